"""Steps back in the registry: what a form changed, so that it can be put back.

A step back touches only the keys that the step changed, and of these only those that still are what
it made of them: what others registered since stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchlab.apply import hooks
from patchlab.mapping.registry import RegistryState, registry_state, restore_registry


@dataclass(frozen=True)
class Step:
    """One change of the registry.

    Attributes:
        name: What was done, such as "clear".
        before: The registry before it.
        after: The registry after it.
    """

    name: str
    before: RegistryState
    after: RegistryState


def undo_step(step: Step) -> None:
    """Put back what a step changed, in its old order and with who registered it when."""
    now = registry_state()
    before, after = step.before, step.after
    entries, provenance = dict(now.entries), dict(now.provenance)
    for key in {*before.entries, *after.entries}:
        old, made = _entry(before, key), _entry(after, key)
        if old == made or _entry(now, key) != made:
            continue
        entries.pop(key, None)
        provenance.pop(key, None)
        if key in before.entries:
            entries[key] = before.entries[key]
        if key in before.provenance:
            provenance[key] = before.provenance[key]
    # Patterns are tried in order, so the order is put back too.
    order = [*(key for key in before.entries if key in entries), *entries]
    restore_registry(RegistryState({key: entries[key] for key in order}, provenance))
    # Whether patchlab's own entries are left decides whether its hook stands; this looks again.
    hooks.hold("form")
    hooks.release("form")


def _entry(state: RegistryState, key: str) -> tuple[object, object]:
    """Return a key's class with its provenance: registering a class again changes who and when."""
    return state.entries.get(key), state.provenance.get(key)
