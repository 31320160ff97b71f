"""Weight conversions of a scope: for loads in its context alone, and gone afterwards.

transformers keeps conversions in one dict for the process and has no unregister
(`conversion_mapping.py`, 5.24.0). A scope does not write to it. While a scope with conversions is
open, the look-up function is wrapped, and answers from the scope for a load in the scope's context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from patchlab._upstream import conversion_cache, conversion_lookups, user_conversions
from patchlab.errors import MappingError, MappingTypeError

Conversions = dict[str, list[Any]]

_wrapped: dict[tuple[str, str], tuple[ModuleType, Callable[..., Any], Callable[..., Any]]] = {}
_marked: set[str] = set()


def check_conversions(conversions: Any) -> Conversions:
    """Return a copy of the conversions of a scope, each list its own.

    Args:
        conversions: Model type or class name → list of `WeightConverter` and `WeightRenaming`; None
            for none.

    Raises:
        MappingTypeError: It is no dict, a name no string, or an item no weight conversion.
        MappingError: A name is empty.
    """
    if conversions is None:
        return {}
    if not isinstance(conversions, Mapping):
        raise MappingTypeError(
            f"conversions must be a dict from model type or class name to a list of weight "
            f"conversions, got {type(conversions).__name__}. Write {{'llama': "
            f"[WeightConverter(...)]}}."
        )
    checked: Conversions = {}
    for name, items in conversions.items():
        if not isinstance(name, str):
            raise MappingTypeError(
                f"conversions are named by a model type or class name, got {name!r}. Use a string "
                f"such as 'llama'."
            )
        if not name.strip():
            raise MappingError("a conversion has an empty name. Use a model type such as 'llama'.")
        if not isinstance(items, list | tuple):
            raise MappingTypeError(
                f"the conversions of {name!r} must be a list, got {type(items).__name__}. "
                f"Write {{{name!r}: [WeightConverter(...)]}}."
            )
        for item in items:
            parts = ("source_patterns", "target_patterns")
            if isinstance(item, type) or not all(hasattr(item, part) for part in parts):
                raise MappingTypeError(
                    f"the conversions of {name!r} hold {item!r}, which is no WeightConverter or "
                    f"WeightRenaming. Import them from transformers.conversion_mapping."
                )
        checked[name] = list(items)
    return checked


def registered_conversions() -> Conversions:
    """Return what was registered with transformers itself, by name; not what scopes have."""
    names = user_conversions() - _marked
    cache = conversion_cache() if names else {}
    return {name: list(cache[name]) for name in sorted(names) if name in cache}


def synchronize_conversions(names: set[str], find: Callable[[str], list[Any] | None]) -> None:
    """Wrap the look-up of conversions while any scope has some, and unwrap it afterwards.

    May be interrupted anywhere and called again.

    Args:
        names: The names for which some open scope has conversions.
        find: Returns what this context's scopes say of a name, None for nothing.
    """
    if names:
        for module, name in conversion_lookups():
            at = (module.__name__, name)
            if at not in _wrapped:
                real = getattr(module, name)
                _wrapped[at] = (module, real, wrapper := _answering(real, find))
                setattr(module, name, wrapper)
        # transformers skips a model class from outside the library unless its conversion was
        # registered by the user; a replaced model class is one.
        for name in names - user_conversions():
            _marked.add(name)
            user_conversions().add(name)
    for name in _marked - names:
        user_conversions().discard(name)
        _marked.discard(name)
    if not names:
        for at, (module, real, wrapper) in list(_wrapped.items()):
            if getattr(module, at[1]) is wrapper:
                setattr(module, at[1], real)
            del _wrapped[at]


def _answering(
    real: Callable[..., Any], find: Callable[[str], list[Any] | None]
) -> Callable[..., Any]:
    def get_checkpoint_conversion_mapping(model_type: str) -> Any:
        own = find(model_type)
        # A deep copy, as transformers gives: it writes the scope of a sub-model into the items.
        return real(model_type) if own is None else copy.deepcopy(own)

    return get_checkpoint_conversion_mapping
