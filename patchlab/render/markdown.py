"""Markdown as static HTML: the little of it that patchlab's own pages use.

Headings, paragraphs, fenced code, and code within a line. Everything else is text and is escaped,
so that whatever a page holds stays text. Looks like the tables beside it, on light and on dark.
"""

from __future__ import annotations

import re

from patchlab.render.html import mono, text_html

_BLOCK = re.compile(r"^```\w*\n(?P<code>.*?)^```$|^(?P<level>#+) (?P<head>[^\n]+)$", re.M | re.S)
_CODE = re.compile(r"`([^`\n]+)`")
_PRE = (
    "margin:4px 0 10px;padding:8px 10px;overflow-x:auto;color:inherit;border-radius:4px;"
    "background:rgba(128,128,128,.1);line-height:1.45"
)


def markdown_html(text: str) -> str:
    """Write a page as a fragment of HTML that needs no style sheet."""
    parts, end = ['<div style="max-width:78ch;color:inherit">'], 0
    for block in _BLOCK.finditer(text):
        parts += _paragraphs(text[end : block.start()])
        if block["head"]:
            tag = f"h{min(len(block['level']) + 2, 6)}"
            parts.append(f'<{tag} style="margin:10px 0 4px">{_line(block["head"])}</{tag}>')
        else:
            code = "\n".join(map(text_html, block["code"].rstrip("\n").split("\n")))
            parts.append(f'<pre style="{_PRE};{mono()}">{code}</pre>')
        end = block.end()
    return "".join([*parts, *_paragraphs(text[end:]), "</div>"])


def _paragraphs(text: str) -> list[str]:
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [f'<p style="margin:0 0 8px">{_line(part)}</p>' for part in found if part]


def _line(text: str) -> str:
    # Of the pieces that split gives, every second one is what stood between backticks.
    pieces = _CODE.split(text)
    return "".join(
        f"<code>{text_html(piece)}</code>" if place % 2 else text_html(piece)
        for place, piece in enumerate(pieces)
    )
