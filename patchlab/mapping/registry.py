"""The registry: transformers' own, written all or nothing, with provenance.

The store is the dict inside `transformers.monkey_patching`, so its `get_patch_mapping()` and ours
always agree, and code that never heard of patchlab keeps working. What is added: rules are checked
before anything is written; after an error nothing has changed; a class that a re-run cell defines
again takes the place of its older self; and each entry knows who registered it, and when.

The four functions keep the names, parameters and error types of transformers 5.24.0
(`monkey_patching.py`): TypeError for what is no module class, ValueError for a key that is taken or
not there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from patchlab._upstream import patch_registry, registered_patches
from patchlab.errors import MappingError, MappingTypeError
from patchlab.mapping.matching import near_names
from patchlab.mapping.rules import PatchMapping, PatchRule, brief

OTHERS = "not registered through patchlab"


@dataclass(frozen=True, slots=True)
class RegisteredEntry:
    """One entry of the registry, with where it came from.

    Attributes:
        by: Who registered it: "register_patch_mapping", "form", "magic", or `OTHERS`.
        when: Seconds since the epoch, None for what others registered.
        problem: Why the entry can never match, "" if it can; only others can bring one in.
    """

    key: str
    replacement: type[nn.Module]
    by: str = OTHERS
    when: float | None = None
    problem: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the entry was registered through patchlab."""
        return self.by != OTHERS


@dataclass(frozen=True, slots=True)
class _Provenance:
    replacement: type[nn.Module]
    by: str
    when: float


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the registry made through patchlab: what was set, what was removed."""

    registered: dict[str, _Provenance]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RegistryState:
    """The registry at one moment, with provenance; for scopes, which put it back."""

    entries: dict[str, type[nn.Module]]
    provenance: dict[str, _Provenance]

    def after(self, change: Change) -> RegistryState:
        """Return the state that a change made meanwhile leads to."""
        entries, provenance = dict(self.entries), dict(self.provenance)
        for key in change.removed:
            entries.pop(key, None)
            provenance.pop(key, None)
        for key, known in change.registered.items():
            entries[key], provenance[key] = known.replacement, known
        return RegistryState(entries, provenance)


_LOCK = threading.RLock()
_provenance: dict[str, _Provenance] = {}
_by: ContextVar[str] = ContextVar("patchlab_registered_by", default="register_patch_mapping")
_followers: list[Callable[[Change], None]] = []


def follow(follower: Callable[[Change], None]) -> None:
    """Have a function called with each change of the registry made through patchlab."""
    if follower not in _followers:
        _followers.append(follower)


@contextmanager
def registered_by(label: str) -> Iterator[None]:
    """Name who registers what is registered inside the block, in this context."""
    token = _by.set(label)
    try:
        yield
    finally:
        _by.reset(token)


def register_patch_mapping(mapping: dict[str, type[nn.Module]], overwrite: bool = False) -> None:
    """Register rules, to be applied whenever `from_pretrained` or `from_config` builds a model.

    All or nothing: after an error the registry is what it was. Registering the same class again
    under its key does nothing, and a class of the same Python module and qualified name (the class
    statement of a cell that was run again) takes the place of the older one without `overwrite`.

    Whether a key is the name of any class is not looked up, as that may take seconds: a misspelled
    one is registered and replaces nothing. `patchlab.survey` judges a mapping against all of the
    installed transformers, `patchlab.preview` against one model.

    Args:
        mapping: Key → replacement class, in the order in which patterns are tried.
        overwrite: Whether keys that are registered already get the new class.

    Raises:
        MappingTypeError: A replacement is no subclass of `torch.nn.Module`, or a key no string.
        MappingError: A key can never match, or is registered for another class.
    """
    rules = PatchMapping.of(mapping)
    now, by = time.time(), _by.get()
    with _LOCK, patch_registry() as registry:
        if not overwrite:
            for rule in rules:
                taken = registry.get(rule.key)
                if taken is not None and not _is_redefinition(taken, rule.replacement):
                    raise MappingError(
                        f"Key {rule.key!r} already has a patch mapping registered, for "
                        f"{_full_name(taken)}. Use overwrite=True to replace it by "
                        f"{_full_name(rule.replacement)}, or "
                        f"unregister_patch_mapping({rule.key!r}) first. Nothing was registered."
                    )
        registered = {rule.key: _Provenance(rule.replacement, by, now) for rule in rules}
        registry.update(rules.to_dict())
        _provenance.update(registered)
    _tell_followers(Change(registered))


def unregister_patch_mapping(keys: Iterable[str] | str) -> None:
    """Remove rules by key, exactly as they were registered.

    Args:
        keys: A key or several.

    Raises:
        MappingError: A key is not registered; nothing is removed.
        MappingTypeError: A key is no string.
    """
    wanted = [keys] if isinstance(keys, str) else _listed(keys)
    for key in wanted:
        if not isinstance(key, str):
            raise MappingTypeError(
                f"key {key!r} is of type {type(key).__name__}; give the keys as they were "
                f"registered, as strings. Nothing was removed."
            )
    with _LOCK, patch_registry() as registry:
        for key in wanted:
            if key not in registry:
                near = near_names(key, registry)
                hint = f"Did you mean {near[0]!r}?" if near else _registered_keys(registry)
                raise MappingError(
                    f"Key {key!r} is not registered, so it cannot be unregistered. {hint} "
                    f"Nothing was removed."
                )
        for key in dict.fromkeys(wanted):
            del registry[key]
            _provenance.pop(key, None)
    _tell_followers(Change({}, tuple(wanted)))


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """Return a copy of what is registered: key → replacement class, in order."""
    # Under the lock: keys that are removed together go one after the other.
    with patch_registry() as registry:
        return dict(registry)


def clear_patch_mapping() -> None:
    """Remove every rule from the registry, whoever registered it."""
    with _LOCK, patch_registry() as registry:
        removed = tuple(registry)
        registry.clear()
        _provenance.clear()
    _tell_followers(Change({}, removed))


def registered_entries() -> tuple[RegisteredEntry, ...]:
    """Return what is registered, in order, with where each entry came from."""
    return tuple(_entry(key, cls) for key, cls in registered_patches().items())


def registered_mapping() -> PatchMapping:
    """Return what is registered as rules, without the entries of others that can never match."""
    return PatchMapping(
        tuple(
            PatchRule(entry.key, entry.replacement)
            for entry in registered_entries()
            if not entry.problem
        )
    )


def registry_state() -> RegistryState:
    """Return the registry as it is now."""
    # Without the lock, which is transformers' and not reentrant: a scope must be able to open and
    # close wherever an interrupt or the garbage collector has it do so.
    return RegistryState(registered_patches(), dict(_provenance))


def restore_registry(state: RegistryState) -> None:
    """Bring the registry back to a state, order included; write nothing if it is there."""
    if list(registered_patches().items()) != list(state.entries.items()):
        with _LOCK, patch_registry() as registry:
            # What stays is never taken out: a build in another thread reads without the lock.
            for key in [key for key in registry if key not in state.entries]:
                del registry[key]
            registry.update(state.entries)
            if list(registry) != list(state.entries):
                registry.clear()
                registry.update(state.entries)
    if _provenance != state.provenance:
        _provenance.clear()
        _provenance.update(state.provenance)


def has_own_entries() -> bool:
    """Tell whether anything registered through patchlab is still registered."""
    return any(entry.is_ours for entry in registered_entries())


def _entry(key: Any, replacement: Any) -> RegisteredEntry:
    try:
        PatchRule(key, replacement)
        problem = ""
    except MappingError as error:
        problem = str(error)
    known = _provenance.get(key)
    if known is None or known.replacement is not replacement:
        return RegisteredEntry(key, replacement, problem=problem)
    return RegisteredEntry(key, replacement, known.by, known.when, problem)


def _is_redefinition(old: type, new: type) -> bool:
    return old is new or (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _listed(keys: Any) -> list[Any]:
    try:
        return list(keys)
    except TypeError as error:
        raise MappingTypeError(
            f"keys must be a key or a list of keys, got {brief(keys)}. Nothing was removed."
        ) from error


def _registered_keys(registry: dict[str, Any]) -> str:
    if not registry:
        return "Nothing is registered."
    return f"Registered are {', '.join(map(repr, registry))}."


def _tell_followers(change: Change) -> None:
    for follower in list(_followers):
        follower(change)
