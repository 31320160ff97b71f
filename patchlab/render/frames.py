"""Frames: the same values as pandas data frames, for those who want to sort and sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patchlab.render.rows import Table


def frame_of(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return a pandas `DataFrame` of columns, in order."""
    # Here and not above: importing pandas takes longer than importing the whole of patchlab.
    import pandas as pd

    return pd.DataFrame(dict(columns))


def table_frame(table: Table) -> Any:
    """Return the rows of a table as a pandas `DataFrame`, with the headings as column names."""
    titles = [column.title for column in table.columns]
    columns: dict[str, list[Any]] = {titles[0]: [row.label for row in table.rows]}
    for place, title in enumerate(titles[1:]):
        columns[title] = [row.cells[place] for row in table.rows]
    columns["depth"] = [row.depth for row in table.rows]
    columns["fold"] = [row.fold for row in table.rows]
    columns[table.note_title or "note"] = [row.note for row in table.rows]
    return frame_of(columns)
