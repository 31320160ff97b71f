"""Code as nested groups, and how it is wrapped.

It is laid out so that `ruff format` and black leave it as it is, at 88 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

WIDTH = 88

Reference = Callable[[Any], str]
"""Returns the name under which a class, function or Python module can be used in the file."""


@dataclass(frozen=True, slots=True)
class Group:
    """Code in brackets: `opening`, the items, separated by commas, and `closing`.

    A tuple of one closes with ",)".
    """

    opening: str
    items: tuple[tuple[str, Code], ...]
    closing: str


Code: TypeAlias = "str | Group"


def layout(code: Code, *, indent: int = 0, used: int = 0) -> str:
    """Return code on one line if it fits, else with one item a line.

    Args:
        code: What to lay out.
        indent: Columns that the line it begins on is indented by.
        used: Columns that are taken on the line, before it and after it.
    """
    line = flat(code)
    if isinstance(code, str) or not code.items or used + len(line) <= WIDTH:
        return line
    inner, closing = " " * (indent + 4), code.closing.lstrip(",")
    lines = [
        f"{inner}{label}{layout(item, indent=indent + 4, used=len(inner) + len(label) + 1)},"
        for label, item in code.items
    ]
    return "\n".join([code.opening, *lines, " " * indent + closing])


def call(name: str, *items: tuple[str, Code]) -> Group:
    """Return a call; an item is a keyword with its "=", or "", and a value."""
    return Group(f"{name}(", items, ")")


def listed(items: list[Code], brackets: str = "[]") -> Group:
    """Return a list, or what other brackets make of it."""
    return Group(brackets[0], tuple(("", item) for item in items), brackets[1])


def quoted(text: str, *, raw: bool = False) -> str:
    """Return a string literal in double quotes, unless that takes more backslashes.

    Args:
        text: The string.
        raw: Whether backslashes are those of a pattern, and should read as such.
    """
    if raw and "\\" in text and not text.endswith("\\") and text.isprintable() and '"' not in text:
        return f'r"{text}"'
    return double_quoted(repr(text))


def flat(code: Code) -> str:
    """Return code on one line."""
    if isinstance(code, str):
        return code
    return code.opening + ", ".join(label + flat(item) for label, item in code.items) + code.closing


def double_quoted(literal: str) -> str:
    """A literal with single quotes, as `repr` writes it, with double ones."""
    if literal[0] == '"' or literal.count('"') > literal.count("\\'"):
        return literal
    return '"' + literal[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
