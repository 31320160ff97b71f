"""Values as Python code: what a constant can be, and how code is wrapped.

Only what reads back as the same value is written. Everything else (a tensor, a module, a lock, an
open file) is refused, since a copy of it would be another object. Code is laid out so that
`ruff format` and black leave it as it is, at 88 columns.
"""

from __future__ import annotations

import dataclasses
import enum
import keyword
import logging
import math
import pathlib
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from patchlab.errors import ExportError

WIDTH = 88
# A constant that is longer is data, and belongs into a file of its own.
LONGEST = 100_000

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
    flat = _flat(code)
    if isinstance(code, str) or not code.items or used + len(flat) <= WIDTH:
        return flat
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
    return _double(repr(text))


def constant(value: Any, reference: Reference) -> Code:
    """Return code that makes an equal value.

    Args:
        value: The constant.
        reference: Names the classes, functions and Python modules in it.

    Raises:
        ExportError: It is nothing that can be written, or too long.
    """
    code = _constant(value, reference, ())
    if len(_flat(code)) > LONGEST:
        raise ExportError(
            f"it takes {len(_flat(code)):,} characters to write, which is data and not a constant. "
            f"Keep it in a file and read that"
        )
    return code


def is_equal(one: Any, other: Any) -> bool:
    """Tell whether two values are of one type and equal; what cannot be compared is not."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _constant(value: Any, reference: Reference, inside: tuple[int, ...]) -> Code:
    if id(value) in inside:
        raise ExportError("it holds itself")
    kind = type(value)
    if kind in _ATOMS:
        return _ATOMS[kind](value)
    if kind in (list, tuple, set, frozenset, dict):
        return _collection(value, lambda item: _constant(item, reference, (*inside, id(value))))
    if isinstance(value, enum.Enum):
        return _member(value, reference)
    if isinstance(value, pathlib.PurePath):
        name = "Path" if isinstance(value, pathlib.Path) else kind.__name__
        return call(reference(getattr(pathlib, name)), ("", quoted(str(value))))
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return f"{reference(torch)}.{str(value).partition('.')[2]}"
    if kind is torch.device:
        return call(f"{reference(torch)}.device", ("", quoted(str(value))))
    if kind is torch.Size:
        return call(f"{reference(torch)}.Size", ("", _collection(tuple(value), str)))
    if kind is re.Pattern:
        flags = value.flags & ~(re.UNICODE if isinstance(value.pattern, str) else 0)
        is_text = isinstance(value.pattern, str)
        text = quoted(value.pattern, raw=True) if is_text else _atom(value.pattern)
        names = [f"{reference(re)}.{flag.name}" for flag in re.RegexFlag if flag & flags]
        more = (("", " | ".join(names)),) if names else ()
        return call(f"{reference(re)}.compile", ("", text), *more)
    if kind is logging.Logger and value is logging.getLogger(value.name):
        return call(f"{reference(logging)}.getLogger", ("", quoted(value.name)))
    alias = _alias(value, reference, lambda item: _constant(item, reference, (*inside, id(value))))
    if alias is not None:
        return alias
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        return reference(value)
    if isinstance(value, typing.TypeVar):
        return _type_variable(value, reference, lambda item: _constant(item, reference, inside))
    if dataclasses.is_dataclass(value):
        return _dataclass(value, reference, inside)
    raise ExportError(f"it is a {_full_name(kind)}, which is no constant that code can make again")


def _number(value: float) -> str:
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return 'float("inf")' if value > 0 else '-float("inf")'
    return repr(value).replace("e+", "e")


def _complex(value: complex) -> str:
    # Not `repr`: "(1-0j)" reads back as 1+0j.
    return f"complex({_number(value.real)}, {_number(value.imag)})"


def _slice(value: slice) -> str:
    return f"slice({_atom(value.start)}, {_atom(value.stop)}, {_atom(value.step)})"


def _atom(value: Any) -> str:
    writer = _ATOMS.get(type(value))
    if writer is None:
        raise ExportError(f"it holds a {_full_name(type(value))}")
    return writer(value)


_ATOMS: dict[type, Callable[[Any], str]] = {
    bool: repr,
    int: repr,
    type(None): repr,
    type(...): lambda value: "...",
    type(NotImplemented): repr,
    float: _number,
    complex: _complex,
    str: quoted,
    bytes: lambda value: "b" + _double(repr(value)[1:]),
    range: repr,
    slice: _slice,
}


def _collection(value: Any, write: Callable[[Any], Code]) -> Code:
    kind = type(value)
    if kind is dict:
        pairs = [(_flat(write(key)) + ": ", write(item)) for key, item in value.items()]
        return Group("{", tuple(pairs), "}")
    items = [write(item) for item in value]
    if kind is list:
        return listed(items)
    if kind is tuple:
        return Group("(", (("", items[0]),), ",)") if len(items) == 1 else listed(items, "()")
    # The order of a set differs from process to process.
    items.sort(key=lambda item: (len(_flat(item)), _flat(item)))
    if kind is set:
        return listed(items, "{}") if items else "set()"
    return call("frozenset", ("", listed(items, "{}"))) if items else "frozenset()"


def _member(value: enum.Enum, reference: Reference) -> Code:
    cls = type(value)
    name = value.name or ""
    if cls.__members__.get(name) is value:
        plain = name.isidentifier() and not keyword.iskeyword(name)
        return f"{reference(cls)}.{name}" if plain else f"{reference(cls)}[{quoted(name)}]"
    if isinstance(value, enum.Flag):
        return call(reference(cls), ("", repr(value.value)))
    raise ExportError(f"{value!r} is no member of {cls.__name__} as it is now")


def _dataclass(value: Any, reference: Reference, inside: tuple[int, ...]) -> Code:
    cls = type(value)
    if isinstance(value, torch.nn.Module):
        raise ExportError(f"it is a {_full_name(cls)}, a live module")
    fields = dataclasses.fields(value)
    hidden = [field.name for field in fields if not field.init]
    if hidden:
        raise ExportError(f"its field {hidden[0]!r} is not set by the constructor")
    items = [
        (f"{field.name}=", _constant(getattr(value, field.name), reference, (*inside, id(value))))
        for field in fields
    ]
    return call(reference(cls), *items)


def _alias(value: Any, reference: Reference, write: Callable[[Any], Code]) -> Code | None:
    """A type alias such as `dict[str, int]` or `int | None`; None if it is none."""
    origin, arguments = typing.get_origin(value), typing.get_args(value)
    if origin is None:
        return None
    items = [("", "None" if argument is type(None) else write(argument)) for argument in arguments]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_flat(item) for _, item in items)
    return Group(f"{reference(origin)}[", tuple(items), "]")


def _type_variable(
    value: typing.TypeVar, reference: Reference, write: Callable[[Any], Code]
) -> Code:
    items = [("", quoted(value.__name__)), *(("", write(c)) for c in value.__constraints__)]
    if value.__bound__ is not None:
        items.append(("bound=", write(value.__bound__)))
    for variance in ("covariant", "contravariant"):
        if getattr(value, f"__{variance}__"):
            items.append((f"{variance}=", "True"))
    return call(reference(typing.TypeVar), *items)


def _double(literal: str) -> str:
    """A literal with single quotes, as `repr` writes it, with double ones."""
    if literal[0] == '"' or literal.count('"') > literal.count("\\'"):
        return literal
    return '"' + literal[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'


def _flat(code: Code) -> str:
    if isinstance(code, str):
        return code
    return (
        code.opening + ", ".join(label + _flat(item) for label, item in code.items) + code.closing
    )


def _full_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
