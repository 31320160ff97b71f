"""Rows: the one vocabulary in which trees, plans, diffs, findings and reports are shown.

A value says what its rows are (a `Table`); the other files of this room say how rows look. The same
table gives the same bytes, in text, HTML, DOT or a payload. Names are text and never markup, and no
row holds a memory address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["plain", "dim", "match", "ok", "warning", "error", "struck"]
Align = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading and how its cells are set.

    Attributes:
        mono: Whether the cells hold code (names, keys, numbers are not).
    """

    title: str
    align: Align = "left"
    mono: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What somebody has to say about one row of a tree that somebody else owns.

    Attributes:
        tone: As in `Row`.
        mark: As in `Row`.
        note: As in `Row`.
        becomes: The class name that takes the place of the row's, "" for none.
    """

    tone: Tone = "match"
    mark: str = ""
    note: str = ""
    becomes: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        depth: Level in the tree, 0 at the root; rows are in preorder.
        label: First column, a name.
        cells: The other columns, as many as `Table.columns` has after the first.
        tone: What the row is meant to say; each tone is also told by `mark` or `note`, since color
            alone tells nothing to some.
        fold: How many equal siblings the row stands for; shown as "× 12".
        mark: One character before the label ("●", "✕", "+", "−", "~"), "" for none.
        note: The state in a word ("replaced", "swallowed"), shown in the last column.
        title: What a pointer resting on the row shows; also the full form of shortened numbers.
    """

    depth: int
    label: str
    cells: tuple[str, ...] = ()
    tone: Tone = "plain"
    fold: int = 1
    mark: str = ""
    note: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    """A line under the rows with something behind it.

    Attributes:
        text: The line.
        more: What opens under it, where something can be opened (HTML); plain text.
    """

    text: str
    more: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with their columns; what every `to_text`, `to_html` and `to_dot` is made from.

    Attributes:
        caption: One line above the rows: the verdict, or what the table is of.
        caption_tone: The tone of the caption.
        footer: Lines under the rows, as plain text, some with more behind them.
        note_title: The heading over the notes of the rows; no row with a note, no such column.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    caption_tone: Tone = "plain"
    footer: tuple[str | Remark, ...] = ()
    note_title: str = ""
