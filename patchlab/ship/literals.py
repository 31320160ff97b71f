"""Values as Python code: what a constant can be.

Only what reads back as the same value is written. Everything else (a tensor, a module, a lock, an
open file) is refused, since a copy of it would be another object.
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
from typing import Any

import torch

from patchlab.errors import ExportError
from patchlab.ship.code import Code, Group, Reference, call, double_quoted, flat, listed, quoted
from patchlab.ship.objects import made_again

# A constant that is longer is data, and belongs into a file of its own.
LONGEST = 100_000


def constant(value: Any, reference: Reference) -> Code:
    """Return code that makes an equal value.

    Args:
        value: The constant.
        reference: Names the classes, functions and Python modules in it.

    Raises:
        ExportError: It is nothing that can be written, or too long.
    """
    code = _constant(value, reference, ())
    if len(flat(code)) > LONGEST:
        raise ExportError(
            f"it takes {len(flat(code)):,} characters to write, which is data and not a constant. "
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
    if isinstance(value, typing.ForwardRef):
        return quoted(value.__forward_arg__)
    if isinstance(value, typing.TypeVar):
        return _type_variable(value, reference, lambda item: _constant(item, reference, inside))
    if dataclasses.is_dataclass(value):
        return _dataclass(value, reference, inside)
    made = made_again(
        value, reference, lambda item: _constant(item, reference, (*inside, id(value)))
    )
    if made is not None:
        return made
    raise ExportError(
        f"it is a {_full_name(kind)}, which is no constant that code can make again. Make it in "
        f"the class or function that uses it, or import it from a Python file"
    )


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
    bytes: lambda value: "b" + double_quoted(repr(value)[1:]),
    range: repr,
    slice: _slice,
}


def _collection(value: Any, write: Callable[[Any], Code]) -> Code:
    kind = type(value)
    if kind is dict:
        pairs = [(flat(write(key)) + ": ", write(item)) for key, item in value.items()]
        return Group("{", tuple(pairs), "}")
    items = [write(item) for item in value]
    if kind is list:
        return listed(items)
    if kind is tuple:
        return Group("(", (("", items[0]),), ",)") if len(items) == 1 else listed(items, "()")
    # The order of a set differs from process to process.
    items.sort(key=lambda item: (len(flat(item)), flat(item)))
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
        # A name in quotes has no `|`.
        if any(isinstance(argument, typing.ForwardRef | str) for argument in arguments):
            return Group(f"{reference(typing)}.Union[", tuple(items), "]")
        return " | ".join(flat(item) for _, item in items)
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


def _full_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
