"""New modules that need no constructor: the old one's attributes under another class.

A replacement that differs from the original in what it computes, and in nothing that the original's
constructor could see, would come out of that constructor just as the original did. It is given the
attributes of the live module instead, with the very same children, which is right in every case
where a second construction would be, and takes a tenth of the time.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from patchlab.apply.parametrized import class_of
from patchlab.apply.swap_sites import Site
from patchlab.mapping.rules import PatchMapping

# What a class may define anew although the original has it: no constructor asks for it.
_UNSEEN = frozenset(
    {
        "forward",
        "extra_repr",
        "__repr__",
        "__module__",
        "__qualname__",
        "__doc__",
        "__annotations__",
        "__annotate_func__",
        "__firstlineno__",
        "__static_attributes__",
        "__orig_bases__",
        "__parameters__",
        "__type_params__",
    }
)
# What runs the old class's forward; a swap carries it over elsewhere, or says that it cannot.
_CALLS = frozenset({"forward", "_old_forward", "_hf_hook", "_compiled_call_impl"})
_HOLDS_NOTHING = frozenset({bool, int, float, str, type(None)})
_NO_REFERENCE = _CALLS | {"_parameters", "_buffers", "_non_persistent_buffers_set"}
_COPIED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def clone_of(site: Site, parts: dict[str, nn.Module], mapping: PatchMapping) -> nn.Module | None:
    """Return a module of the replacement class with the attributes of the old one, if it may be so.

    Args:
        site: What is replaced.
        parts: Path → part of the old module.
        mapping: The rules; a part that one of them matches asks for a construction.

    Returns:
        None where the replacement has to be constructed.
    """
    old, replacement = site.module, site.rule.replacement
    if type(old) is not class_of(old) or not _differs_unseen(replacement, type(old)):
        return None
    classes = {class_of(part) for path, part in parts.items() if path}
    if any(mapping.find(cls.__name__) is not None for cls in classes):
        return None
    if any(_refers_to(part, old) for part in parts.values()):
        return None
    new = object.__new__(replacement)
    attributes = {name: value for name, value in vars(old).items() if name not in _CALLS}
    for name in _COPIED:
        attributes[name] = attributes[name].copy()
    new.__dict__ = attributes
    return new


def _differs_unseen(replacement: type[nn.Module], original: type[nn.Module]) -> bool:
    """Tell whether the original's constructor could not know a replacement from the original."""
    if not issubclass(replacement, original) or type(replacement) is not type(original):
        return False
    known = original.__mro__
    for cls in replacement.__mro__:
        if cls in known:
            continue
        for name, value in vars(cls).items():
            # What `__init_subclass__` repeats on each class makes no difference.
            if name not in _UNSEEN and getattr(original, name, value) is not value:
                return False
        if "__slots__" in vars(cls) or "__getattr__" in vars(cls):
            return False
    return True


def _refers_to(part: nn.Module, old: nn.Module) -> bool:
    """Tell whether a part holds the module it is in, or a method of it, which would be the old."""
    for name, value in vars(part).items():
        # Most of what a module has: flags, tensors, and tables without entries.
        if type(value) in _HOLDS_NOTHING or name in _NO_REFERENCE:
            continue
        items: Any = (value,)
        if isinstance(value, dict):
            if not value:
                continue
            items = value.values()
        elif isinstance(value, (list, tuple)):
            items = value
        for item in items:
            if item is old or (isinstance(item, types.MethodType) and item.__self__ is old):
                return True
            if isinstance(item, functools.partial) and _bound_to(item, old):
                return True
    return False


def _bound_to(function: functools.partial[Any], old: nn.Module) -> bool:
    given = (*function.args, *function.keywords.values())
    return getattr(function.func, "__self__", None) is old or any(item is old for item in given)
