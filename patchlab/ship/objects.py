"""Objects of Python's, torch's and numpy's own that one call makes again."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import operator
import sys
import types
import typing
import uuid
from collections.abc import Callable
from typing import Any

import torch

from patchlab.errors import ExportError
from patchlab.ship.code import Code, Reference, call, listed, quoted

Write = Callable[[Any], Code]

# Operators that torch itself has, wherever it is installed.
_OPERATORS = ("aten", "prims", "quantized")


def made_again(value: Any, reference: Reference, write: Write) -> Code | None:
    """Return the call that makes an equal object, None if there is no such.

    Args:
        value: Anything.
        reference: Names the classes, functions and Python modules in it.
        write: Returns the code of what it holds.

    Raises:
        ExportError: It is of a kind that can be made again, and this one cannot.
    """
    kind = type(value)
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value, reference, write)
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return call(reference(kind), *((f"{n}=", write(getattr(value, n))) for n in kind._fields))
    if kind.__name__ in ("ParamSpec", "TypeVarTuple") and kind.__module__.startswith("typing"):
        return call(reference(kind), ("", quoted(value.__name__)))
    if kind.__module__ == "torch._ops" and str(value).partition(".")[0] in _OPERATORS:
        return f"{reference(torch)}.ops.{value}"
    if type(kind).__module__.partition(".")[0] == "numpy" or kind.__module__ == "numpy":
        return _of_numpy(value, reference, write)
    return None


def named_tuple_fields(value: Any) -> tuple[str, ...] | None:
    """Return the fields of a class that `collections.namedtuple` has made, None of any other."""
    if not isinstance(value, type) or value.__bases__ != (tuple,):
        return None
    own = vars(value)
    # `typing.NamedTuple` leaves annotations.
    typed = any(name.startswith("__annot") or name == "__orig_bases__" for name in own)
    made = "_field_defaults" in own and not typed
    return own["_fields"] if made and isinstance(own.get("_fields"), tuple) else None


def named_tuple(cls: type, reference: Reference, write: Write) -> Code:
    """Return the call of `collections.namedtuple` that makes a class again."""
    fields = named_tuple_fields(cls) or ()
    words: list[tuple[str, Code]] = []
    if vars(cls)["_field_defaults"]:
        given = [write(item) for item in vars(cls)["_field_defaults"].values()]
        words = [("defaults=", listed(given))]
    names = listed([quoted(name) for name in fields])
    made = reference(collections.namedtuple)
    return call(made, ("", quoted(cls.__name__)), ("", names), *words)


def _partial(value: Any, reference: Reference, write: Write) -> Code:
    if vars(value):
        raise ExportError(f"it was given an attribute {min(vars(value))!r}, which no call makes")
    words = [(f"{name}=", write(item)) for name, item in value.keywords.items()]
    if not all(name.isidentifier() for name in value.keywords):
        raise ExportError("it has an argument whose name is none that Python code can use")
    given = [("", write(item)) for item in (value.func, *value.args)]
    return call(reference(functools.partial), *given, *words)


def _new_type(value: Any, reference: Reference, write: Write) -> Code:
    items = (("", quoted(value.__name__)), ("", write(value.__supertype__)))
    return call(reference(typing.NewType), *items)


def _default_dict(value: Any, reference: Reference, write: Write) -> Code:
    items = [("", write(value.default_factory)), *([("", write(dict(value)))] if value else [])]
    return call(reference(collections.defaultdict), *items)


def _of_pairs(value: Any, reference: Reference, write: Write) -> Code:
    return call(reference(type(value)), *([("", write(dict(value)))] if value else []))


def _deque(value: Any, reference: Reference, write: Write) -> Code:
    longest = [] if value.maxlen is None else [("maxlen=", write(value.maxlen))]
    return call(reference(collections.deque), ("", write(list(value))), *longest)


def _namespace(value: Any, reference: Reference, write: Write) -> Code:
    words = [(f"{name}=", write(item)) for name, item in vars(value).items()]
    return call(reference(types.SimpleNamespace), *words)


def _time(value: Any, reference: Reference, write: Write) -> Code:
    if getattr(value, "tzinfo", None) not in (None, datetime.timezone.utc):
        raise ExportError("its time zone is no constant. Use UTC")
    return repr(value).replace("datetime.", f"{reference(datetime)}.")


def _of_text(value: Any, reference: Reference, write: Write) -> Code:
    return call(reference(type(value)), ("", quoted(str(value))))


def _getter(value: Any, reference: Reference, write: Write) -> Code:
    made, arguments = value.__reduce__()[:2]
    if made is not type(value):
        raise ExportError("it has arguments with a name. Write it as a function with def")
    return call(reference(made), *(("", write(item)) for item in arguments))


def _limits(value: Any, reference: Reference, write: Write) -> Code:
    name = reference(torch)
    return f"{name}.{type(value).__name__}({name}.{value.dtype})"


def _method(value: Any, reference: Reference, write: Write) -> Code:
    owner, name = value.__self__, value.__name__
    if not isinstance(owner, type):
        raise ExportError(
            f"it is the method {name} of an object, and a file cannot hold the object. Write a "
            f"function with def that makes one and calls it"
        )
    return f"{reference(owner)}.{name}"


def _unbound(value: Any, reference: Reference, write: Write) -> Code:
    name = value.__name__
    if getattr(torch.Tensor, name, None) is value:
        return f"{reference(torch)}.Tensor.{name}"
    return f"{reference(value.__objclass__)}.{name}"


def _of_numpy(value: Any, reference: Reference, write: Write) -> Code | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.dtype):
        simple = value.names is None and value.subdtype is None and not value.hasobject
        return call(f"{reference(numpy)}.dtype", ("", quoted(value.str))) if simple else None
    if not isinstance(value, numpy.generic | numpy.ndarray) or value.dtype.kind not in "biuf":
        return None
    if value.dtype.itemsize > 8 or type(value) not in (numpy.ndarray, value.dtype.type):
        return None
    if isinstance(value, numpy.generic):
        return call(f"{reference(numpy)}.{type(value).__name__}", ("", write(value.item())))
    dtype = ("dtype=", quoted(value.dtype.name))
    if 0 in value.shape:
        return call(f"{reference(numpy)}.zeros", ("", write(value.shape)), dtype)
    return call(f"{reference(numpy)}.array", ("", write(value.tolist())), dtype)


_WRITERS: dict[type, Callable[[Any, Reference, Write], Code]] = {
    functools.partial: _partial,
    typing.NewType: _new_type,
    collections.defaultdict: _default_dict,
    collections.OrderedDict: _of_pairs,
    collections.Counter: _of_pairs,
    collections.deque: _deque,
    types.MappingProxyType: _of_pairs,
    types.SimpleNamespace: _namespace,
    datetime.date: _time,
    datetime.time: _time,
    datetime.datetime: _time,
    datetime.timedelta: _time,
    fractions.Fraction: _of_text,
    decimal.Decimal: _of_text,
    uuid.UUID: _of_text,
    operator.itemgetter: _getter,
    operator.attrgetter: _getter,
    operator.methodcaller: _getter,
    torch.finfo: _limits,
    torch.iinfo: _limits,
    types.MethodType: _method,
    types.MethodDescriptorType: _unbound,
    types.WrapperDescriptorType: _unbound,
}
