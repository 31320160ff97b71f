"""What a scope finds in transformers' process-wide stores, and puts back when it closes.

Code inside a scope may register patches, conversions or recorders, itself or through transformers
(`fusion_config` and `kernel_config` do, and never take them out). A `Snapshot` is what was there
when the scope opened; restoring it keeps the entries of others and never clears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patchlab._upstream import (
    conversion_module,
    loaded_conversion_cache,
    recorder_registry,
    user_conversions,
)
from patchlab.mapping.registry import Change, RegistryState, registry_state, restore_registry


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """The three stores at one moment; dicts are copied, what they hold is not."""

    registry: RegistryState
    conversions: dict[str, Any] | None
    user_conversions: frozenset[str]
    recorders: tuple[tuple[str, Any, tuple[tuple[str, Any, Any], ...]], ...]


def take_snapshot(marked: frozenset[str] = frozenset()) -> Snapshot:
    """Note what is in the stores now; `marked` are the names that open scopes put in themselves."""
    cache = loaded_conversion_cache()
    return Snapshot(
        registry=registry_state(),
        conversions=None if cache is None else dict(cache),
        user_conversions=frozenset(user_conversions() - marked),
        recorders=tuple(
            (name, specs, tuple((k, v, getattr(v, "target_class", None)) for k, v in specs.items()))
            for name, specs in list(dict.items(recorder_registry()))
            if isinstance(specs, dict)
        ),
    )


def restore_snapshot(snapshot: Snapshot, marked: frozenset[str] = frozenset()) -> None:
    """Bring the stores back to a snapshot; what has not changed is not touched."""
    restore_registry(snapshot.registry)
    _restore_conversions(snapshot, marked)
    _restore_recorders(snapshot)


def with_change(snapshot: Snapshot, change: Change) -> Snapshot:
    """Return the snapshot with a change that somebody outside of any scope made meanwhile."""
    return Snapshot(
        snapshot.registry.after(change),
        snapshot.conversions,
        snapshot.user_conversions,
        snapshot.recorders,
    )


def _restore_conversions(snapshot: Snapshot, marked: frozenset[str]) -> None:
    cache, by_user = loaded_conversion_cache(), user_conversions()
    unchanged = by_user - marked == snapshot.user_conversions
    if cache is None or (unchanged and _same(cache, snapshot)):
        return
    if snapshot.conversions is None:
        # Nobody had asked for conversions before the scope, so what was there is what transformers
        # builds when it is first asked.
        vars(conversion_module())["_checkpoint_conversion_mapping_cache"] = None
    else:
        for name in [name for name in cache if name not in snapshot.conversions]:
            del cache[name]
        cache.update(snapshot.conversions)
    by_user.intersection_update(snapshot.user_conversions | marked)
    by_user.update(snapshot.user_conversions)


def _same(cache: dict[str, Any], snapshot: Snapshot) -> bool:
    if snapshot.conversions is None:
        return True
    return len(cache) == len(snapshot.conversions) and all(
        cache.get(name) is items for name, items in snapshot.conversions.items()
    )


def _restore_recorders(snapshot: Snapshot) -> None:
    registry = recorder_registry()
    for name, specs, contents in snapshot.recorders:
        if dict.get(registry, name) is not specs:
            dict.__setitem__(registry, name, specs)
        for key, spec, target in contents:
            if specs.get(key) is not spec:
                specs[key] = spec
            if getattr(spec, "target_class", None) is not target:
                spec.target_class = target
        for key in [key for key in specs if key not in {k for k, _, _ in contents}]:
            del specs[key]
