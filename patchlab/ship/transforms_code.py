"""Weight conversions as constructor calls."""

from __future__ import annotations

import inspect
from typing import Any

from patchlab._upstream import written_patterns
from patchlab.errors import ExportError
from patchlab.ship.code import Code, Reference, call, listed, quoted
from patchlab.ship.literals import constant, is_equal

_MISSING = object()
_PATTERNS = ("source_patterns", "target_patterns")


def transform_code(transform: Any, reference: Reference) -> Code:
    """Return the call that makes a `WeightConverter`, a `WeightRenaming`, or one of their kind.

    Raises:
        ExportError: What it was made with can no longer be told, or cannot be written.
    """
    patterns = dict(zip(_PATTERNS, written_patterns(transform), strict=True))
    items: list[tuple[str, Code]] = []
    for name, default in _parameters(type(transform)).items():
        if name in patterns:
            texts: list[Code] = [quoted(text, raw=True) for text in patterns[name]]
            one = len(texts) == 1 and type(transform).__name__ == "WeightRenaming"
            items.append((f"{name}=", texts[0] if one else listed(texts)))
        elif name == "operations":
            operations = [_instance(operation, reference) for operation in transform.operations]
            items.append((f"{name}=", listed(operations)))
        else:
            items += _argument(transform, name, default, reference)
    return call(reference(type(transform)), *items)


def _instance(value: Any, reference: Reference) -> Code:
    """The call that makes an operation, whose constructor keeps what it is given."""
    items: list[tuple[str, Code]] = []
    given: dict[str, Any] = {}
    for name, default in _parameters(type(value)).items():
        items += _argument(value, name, default, reference)
        given[name] = getattr(value, name)
    again = vars(type(value)(**given))
    for name, kept in vars(value).items():
        if name not in again or not is_equal(again[name], kept):
            raise ExportError(
                f"the {name} of {type(value).__name__} is {kept!r}, which its constructor does not "
                f"make of what it takes. Give it a constructor that keeps all that it is given, "
                f"under the same names"
            )
    return call(reference(type(value)), *items)


def _argument(owner: Any, name: str, default: Any, reference: Reference) -> list[tuple[str, Code]]:
    value = getattr(owner, name, _MISSING)
    if value is _MISSING:
        raise ExportError(
            f"{type(owner).__name__} does not keep its argument {name!r}. Set self.{name} in its "
            f"constructor"
        )
    if default is not inspect.Parameter.empty and is_equal(default, value):
        return []
    return [(f"{name}=", constant(value, reference))]


def _parameters(cls: type) -> dict[str, Any]:
    """Name → default of the arguments of a constructor."""
    parameters = inspect.signature(cls).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        raise ExportError(
            f"the constructor of {cls.__name__} takes arguments without a name. Name them"
        )
    return {parameter.name: parameter.default for parameter in parameters}
