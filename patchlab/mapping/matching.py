"""Which rule decides a class name, and why: pure functions on rules and strings.

`explain_match` is the whole answer for one name: the rule that decides, and the rules that fit but
never decide it. Everything that shows matches (plans, trees, forms) asks here, so that what is
shown and what happens cannot differ.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from patchlab.mapping.rules import PatchMapping, PatchRule

# What a pattern has around the name it means; r"\b" as two characters, so that no letter b goes.
_DECORATION = re.compile(r"^(?:\\b|[\^$.*()?: ])+|(?:\\b|[\^$.*()?: ])+$")

MatchKind = Literal["exact", "pattern", "none"]


@dataclass(frozen=True, slots=True)
class Match:
    """What the rules say about one class name."""

    class_name: str
    rule: PatchRule | None
    shadowed: tuple[PatchRule, ...] = ()

    @property
    def kind(self) -> MatchKind:
        """How the deciding rule matched."""
        if self.rule is None:
            return "none"
        return "exact" if self.rule.is_exact else "pattern"


def explain_match(class_name: str, mapping: PatchMapping) -> Match:
    """Say which rule decides a class name and which others fit it in vain."""
    rule = mapping.find(class_name)
    if rule is None:
        return Match(class_name, None)
    others = tuple(other for other in mapping if other is not rule and other.matches(class_name))
    return Match(class_name, rule, others)


def near_names(key: str, names: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """Return the names that were probably meant by a key that matches none, best first.

    A name that differs only in case comes before all others.
    """
    wanted = _DECORATION.sub("", key)
    folded: dict[str, str] = {}
    for name in sorted(names):
        folded.setdefault(name.casefold(), name)
    if not wanted:
        return ()
    exact_case = folded.get(wanted.casefold())
    close = difflib.get_close_matches(wanted.casefold(), list(folded), n=limit + 1, cutoff=0.75)
    found = [folded[name] for name in close if folded[name] != key]
    if exact_case is not None and exact_case != key:
        found = [exact_case, *(name for name in found if name != exact_case)]
    return tuple(found[:limit])
