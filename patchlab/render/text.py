"""Text: rows as aligned lines with box-drawing guides.

Widths are those of a terminal or a notebook's monospaced font: East Asian wide characters take two
columns, combining ones none. The width to fit is an argument and never the terminal's, so that the
same rows give the same bytes everywhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from patchlab.render.rows import Column, Remark, Row, Table

MAX_TEXT_ROWS = 1_000
_GAP = "  "
# Widths down to which the first and the other columns give way, in turns.
_FLOORS = ((44, 28), (24, 16), (8, 8))
# Whatever may take another width than one column: all but Latin, dashes, arrows and guides.
_PERHAPS_ODD = re.compile("[^\x00-\u02ff\u2010-\u2027\u2190-\u21ff\u2212\u2500-\u257f\u25cf]")


def table_text(table: Table, *, width: int = 100, max_rows: int = MAX_TEXT_ROWS) -> str:
    """Write a table as text, without a final newline.

    Args:
        table: The rows with their columns.
        width: Columns to fit into; longer cells are cut and end in "…".
        max_rows: Rows to write; what is left out is counted in a last line.
    """
    rows = table.rows[:max_rows]
    columns = [*table.columns]
    lines = [
        [text_label(row, guide), *map(printable, row.cells)]
        for row, guide in zip(rows, guides([row.depth for row in rows]), strict=True)
    ]
    if any(row.note for row in rows):
        columns.append(Column(table.note_title))
        for line, row in zip(lines, rows, strict=True):
            line.append(printable(row.note))
    if lines and len(columns) > 1 and any(column.title for column in columns):
        lines.insert(0, [column.title for column in columns])
    measured = [[(cell, text_width(cell)) for cell in line] for line in lines]
    widths = _fit(measured, columns, width)
    written = [printable(table.caption)] if table.caption else []
    written += (_line(line, columns, widths) for line in measured)
    if len(table.rows) > max_rows:
        written.append(f"… {len(table.rows) - max_rows:,} more rows")
    lines_below = (line.text if isinstance(line, Remark) else line for line in table.footer)
    written += map(printable, lines_below)
    return "\n".join(written)


def text_label(row: Row, guide: str = "") -> str:
    """Write a row's first column: guide, mark, name and how many it stands for."""
    mark = f"{row.mark} " if row.mark else ""
    times = f" × {row.fold:,}" if row.fold > 1 else ""
    return f"{guide}{mark}{printable(row.label)}{times}"


def guides(depths: Sequence[int]) -> list[str]:
    """Draw the lines of a tree, given the depth of each row in preorder.

    Example:
        >>> guides([0, 1, 2, 1])
        ['', '├─ ', '│  └─ ', '└─ ']
    """
    drawn = [""] * len(depths)
    # From the last row up: a level is open while a later row stands on it, below the same parent.
    is_open: list[bool] = []
    for place in range(len(depths) - 1, -1, -1):
        depth = depths[place]
        del is_open[depth + 1 :]
        is_open += [False] * (depth + 1 - len(is_open))
        if depth:
            outer = "".join("│  " if open_ else "   " for open_ in is_open[1:depth])
            drawn[place] = outer + ("├─ " if is_open[depth] else "└─ ")
        is_open[depth] = True
    return drawn


def printable(text: str) -> str:
    """Write control, format and unassigned characters as escapes; everything else stays.

    A name may hold a line break, a terminal sequence or a direction override, and would then change
    the lines around it.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def text_width(text: str) -> int:
    """Count the columns that a text takes."""
    if not _PERHAPS_ODD.search(text):
        return len(text)
    return sum(map(_char_width, text))


def cut(text: str, width: int) -> str:
    """Cut a text to a width, with "…" for what is left out."""
    if text_width(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += _char_width(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept).rstrip() + "…"


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fit(
    lines: Sequence[Sequence[tuple[str, int]]], columns: Sequence[Column], width: int
) -> list[int]:
    widths = (
        [max(line[place][1] for line in lines) for place in range(len(columns))] if lines else []
    )
    excess = sum(widths) + len(_GAP) * (len(columns) - 1) - width
    # The last column gives way first, the names last; numbers never, since a number that is cut is
    # another number.
    for floors in _FLOORS:
        for place in range(len(widths) - 1, -1, -1):
            floor = floors[place > 0]
            if excess > 0 and columns[place].align == "left" and widths[place] > floor:
                step = min(excess, widths[place] - floor)
                widths[place] -= step
                excess -= step
    return widths


def _line(
    cells: Sequence[tuple[str, int]], columns: Sequence[Column], widths: Sequence[int]
) -> str:
    parts = []
    for (text, taken), column, width in zip(cells, columns, widths, strict=True):
        if taken > width:
            text = _shorten(text, width)
            taken = text_width(text)
        space = " " * (width - taken)
        parts.append(space + text if column.align == "right" else text + space)
    return _GAP.join(parts).rstrip()


def _shorten(text: str, width: int) -> str:
    # How many modules a row stands for must not be what is cut off.
    body, times, number = text.rpartition(" × ")
    if times and number.replace(",", "").isdigit() and len(number) + 8 < width:
        return cut(body, width - len(times + number)) + times + number
    return cut(text, width)
