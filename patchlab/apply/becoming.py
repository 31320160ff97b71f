"""Whether an instance of an original can become a replacement, and what to say where that fails.

A patch takes effect inside the call of the original, when the instance exists already: it is given
the replacement class and the replacement's `__init__` runs. What a class does elsewhere than in
`__init__` when it is called cannot happen then, and is refused before the block runs.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from patchlab.errors import ApplyError
from patchlab.mapping.rules import PatchRule


def check_assignable(original: type[nn.Module], rule: PatchRule) -> None:
    """Refuse a replacement that an instance of the original cannot be turned into.

    Raises:
        ApplyError: The replacement has `__slots__`, its own `__new__`, a metaclass with its own
            `__call__`, or abstract methods.
    """
    replacement = rule.replacement
    which = f"{replacement.__qualname__}, the replacement of {original.__name__} (key {rule.key!r})"
    if replacement.__new__ is not original.__new__:
        raise ApplyError(
            f"{which}, defines __new__, which a patch cannot run: the instance exists already when "
            f"the patch takes effect. Move what it does into __init__."
        )
    if type(replacement).__call__ is not type(original).__call__:
        raise ApplyError(
            f"{which}, has a metaclass, {type(replacement).__qualname__}, that defines __call__, "
            f"which a patch cannot run: the call was made on the original. Move what it does into "
            f"__init__."
        )
    if inspect.isabstract(replacement):
        missing = ", ".join(sorted(getattr(replacement, "__abstractmethods__", ())))
        raise ApplyError(
            f"{which}, is abstract, so no instance of it can be made. Define {missing}."
        )
    if inspect.isabstract(original):
        return  # never an instance's own class
    try:
        probe = object.__new__(original)
        probe.__class__ = replacement
    except TypeError as error:
        raise ApplyError(
            f"an instance of {original.__name__} cannot become a {replacement.__qualname__} (key "
            f"{rule.key!r}): {error}. A replacement must not define __slots__ or mix in a class "
            f"with a layout of its own."
        ) from error


def blame(
    error: Exception,
    cls: type,
    rule: PatchRule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Have an error from a replacement's constructor say whose constructor, and how it was called.

    The exception stays what it is, so that whoever catches it catches it still. Of replacements
    inside one another the innermost says it. Python 3.10 knows notes by their name alone, and does
    not print them.
    """
    notes: list[str] = list(getattr(error, "__notes__", ()))
    if any(note.startswith("patchlab: ") for note in notes):
        return
    given = [type(value).__name__ for value in args]
    given += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
    notes.append(
        f"patchlab: {rule.replacement.__qualname__} was being built in place of {cls.__name__} "
        f"(key {rule.key!r}), called as {rule.replacement.__name__}({', '.join(given)})."
    )
    error.__notes__ = notes
