"""What is in force where a file is exported: the scopes around it, then what is registered.

The rules of several scopes become one mapping that decides as they do one after the other. The
innermost scope comes first. An exact name wins over a pattern inside of one mapping, so one of an
outer scope is left out where an inner pattern has decided it.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchlab.apply.construct import open_frames
from patchlab.apply.conversions import Conversions, registered_conversions
from patchlab.mapping.registry import registered_mapping
from patchlab.mapping.rules import PatchMapping, PatchRule


@dataclass(frozen=True, slots=True)
class InForce:
    """The rules and conversions in force in a context.

    Attributes:
        mapping: The rules.
        conversions: Model type or class name → weight conversions.
        from_scopes: The keys that a scope brings, and the registry does not.
    """

    mapping: PatchMapping
    conversions: Conversions
    from_scopes: tuple[str, ...]


def in_force() -> InForce:
    """Return what is in force in this context."""
    frames = [frame for frame in reversed(open_frames()) if not frame.dry]
    registered = registered_mapping()
    rules: dict[str, PatchRule] = {}
    scoped: list[str] = []
    inner: list[PatchMapping] = []
    for mapping in (*(f.mapping for f in frames if not f.registered), registered):
        for rule in mapping:
            decided = rule.is_exact and any(m.find(rule.key) is not None for m in inner)
            if rule.key in rules or decided:
                continue
            rules[rule.key] = rule
            if mapping is not registered:
                scoped.append(rule.key)
        inner.append(mapping)
    conversions = registered_conversions()
    for frame in reversed(frames):
        conversions = conversions | frame.conversions
    return InForce(PatchMapping(tuple(rules.values())), conversions, tuple(scoped))
