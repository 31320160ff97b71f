"""Static HTML: rows as a table that reads well wherever a notebook is shown.

GitHub, nbviewer and an untrusted notebook in JupyterLab drop style sheets, scripts and pictures,
and some drop inline styles as well. So this is one plain table; indentation is also in the text,
each tone is also told by its mark or note, and every name is escaped. Colors are mixed with the
color of the text around, so one output is right on light and on dark ground.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from patchlab.render.rows import Column, Remark, Row, Table, Tone
from patchlab.render.text import cut, printable

MAX_HTML_ROWS = 1_000
_OPEN_ROWS = 200
_ACCENTS: dict[Tone, str] = {
    "match": "37,99,235",
    "ok": "22,140,70",
    "warning": "190,110,0",
    "error": "220,38,38",
    "struck": "220,38,38",
}
_STEP = 14
_ROW = "21px"
_NOTE_WIDTH = 72
_SANS = "system-ui,-apple-system,Segoe UI,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
_LINE = "rgba(128,128,128,.35)"
# Notebooks center tables, stripe rows and align cells to the right; all that is answered here.
_TABLE = (
    f"border-collapse:collapse;border:0;margin:0;width:auto;table-layout:auto;color:inherit;"
    f"background:transparent;font:13px/21px {_SANS}"
)


def table_html(table: Table, *, max_rows: int = MAX_HTML_ROWS) -> str:
    """Write a table as a fragment of HTML.

    Args:
        table: The rows with their columns.
        max_rows: Rows to write; what is left out is counted below. Rows beyond the first 200 can be
            opened with a click.
    """
    rows = table.rows[:max_rows]
    columns = [*table.columns]
    has_notes = any(row.note for row in rows)
    if has_notes:
        columns.append(Column(table.note_title))
    parts = ['<div style="overflow-x:auto;color:inherit">']
    caption = _caption(table)
    if rows:
        parts.append(_table(rows[:_OPEN_ROWS], columns, has_notes, caption))
    elif caption:
        parts.append(f'<div style="font:13px/21px {_SANS}">{caption}</div>')
    if len(rows) > _OPEN_ROWS:
        inner = _table(rows[_OPEN_ROWS:], columns, has_notes, "")
        parts.append(
            f'<details><summary style="font:13px/21px {_SANS};cursor:pointer">'
            f"{len(rows) - _OPEN_ROWS:,} more rows</summary>{inner}</details>"
        )
    left_out = len(table.rows) - len(rows)
    footer = [f"… {left_out:,} more rows are not shown here."] if left_out else []
    parts += map(remark_html, (*footer, *table.footer))
    parts.append("</div>")
    return "".join(parts)


def remark_html(line: str | Remark) -> str:
    """Write a line below a table; one with more behind it can be opened."""
    style = f"font:13px/21px {_SANS};padding:2px 8px"
    if isinstance(line, str):
        return f'<div style="{style}">{text_html(line)}</div>'
    return (
        f'<details style="{style}"><summary style="cursor:pointer">{text_html(line.text)}'
        f'</summary><div style="padding:2px 16px;max-width:78ch">{text_html(line.more)}</div>'
        f"</details>"
    )


def mono() -> str:
    """Return the style of code."""
    return f"font-family:{_MONO};font-size:12px"


def text_html(text: str) -> str:
    """Escape a text for use between tags or in a quoted attribute."""
    return escape(printable(text), quote=True)


def accent(tone: Tone) -> str:
    """Return the style of text in a tone: half the accent, half the text color around it."""
    rgb = _ACCENTS.get(tone)
    return f"color:color-mix(in srgb,rgb({rgb}) 62%,currentColor);font-weight:600" if rgb else ""


def _caption(table: Table) -> str:
    if not table.caption:
        return ""
    style = accent(table.caption_tone) or "font-weight:600"
    return f'<span style="{style}">{text_html(table.caption)}</span>'


def _table(rows: Sequence[Row], columns: Sequence[Column], has_notes: bool, caption: str) -> str:
    parts = [f'<table style="{_TABLE}">']
    if caption:
        parts.append(
            f'<caption align="left" style="caption-side:top;text-align:left;color:inherit;'
            f'padding:4px 8px;white-space:nowrap">{caption}</caption>'
        )
    if len(columns) > 1 and any(column.title for column in columns):
        parts.append('<thead><tr style="background:transparent">')
        for column in columns:
            parts.append(
                f'<th scope="col" align="{column.align}" style="text-align:{column.align};'
                f'padding:1px 8px;font-weight:400;border:0;border-bottom:1px solid {_LINE}">'
                f'<span style="opacity:.75">{text_html(column.title)}</span></th>'
            )
        parts.append("</tr></thead>")
    parts.append("<tbody>")
    parts += (_row(row, columns, has_notes) for row in rows)
    parts.append("</tbody></table>")
    return "".join(parts)


def _row(row: Row, columns: Sequence[Column], has_notes: bool) -> str:
    rgb = _ACCENTS.get(row.tone)
    tint = f"rgba({rgb},.09)" if rgb and row.tone != "struck" else "transparent"
    title = f' title="{text_html(row.title)}"' if row.title else ""
    text = _text_style(row)
    edge = f"border:0;border-left:3px solid {f'rgb({rgb})' if rgb else 'transparent'}"
    parts = [
        f'<tr style="background:{tint}"{title}>',
        f'<td style="{_cell(columns[0])};{edge}">{_label(row, text)}</td>',
    ]
    for place, (cell, column) in enumerate(zip(row.cells, columns[1:], strict=False)):
        # The class tells what happens to a row, so it takes the accent; numbers stay quiet.
        style = text if column.mono and place == 0 else _struck(row)
        align = ' align="right"' if column.align == "right" else ""
        parts.append(
            f'<td{align} style="{_cell(column)};border:0">{_span(text_html(cell), style)}</td>'
        )
    if has_notes:
        note = _span(text_html(cut(row.note, _NOTE_WIDTH)), accent(row.tone))
        parts.append(f'<td style="{_cell(columns[-1])};border:0">{note}</td>')
    parts.append("</tr>")
    return "".join(parts)


def _label(row: Row, style: str) -> str:
    mark = _span(text_html(row.mark), accent(row.tone)) + " " if row.mark else ""
    name = _span(text_html(row.label), style)
    times = f' <span style="opacity:.75">× {row.fold:,}</span>' if row.fold > 1 else ""
    return f"{_indent(row.depth)}{mark}{name}{times}"


def _indent(depth: int) -> str:
    if not depth:
        return ""
    # Spaces for where styles are dropped; one gradient for the guides, since a box for every level
    # would be most of the bytes of a deep tree. As high as a row, so that the guides meet.
    return (
        f'<span style="display:inline-block;vertical-align:top;height:{_ROW};'
        f"width:{depth * _STEP}px;background:repeating-linear-gradient("
        f'90deg,{_LINE} 0 1px,transparent 1px {_STEP}px)">{"&nbsp;&nbsp;" * depth}</span>'
    )


def _text_style(row: Row) -> str:
    if row.tone == "struck":
        return _struck(row)
    if row.tone == "dim":
        return "opacity:.75"
    return accent(row.tone)


def _struck(row: Row) -> str:
    return "text-decoration:line-through;opacity:.75" if row.tone == "struck" else ""


def _span(html: str, style: str) -> str:
    return f'<span style="{style}">{html}</span>' if style and html else html


def _cell(column: Column) -> str:
    font = f";font-family:{_MONO};font-size:12px" if column.mono else ""
    return f"text-align:{column.align};padding:0 8px;white-space:nowrap;line-height:{_ROW}{font}"
