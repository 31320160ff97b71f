"""Plans: which rule decides which class, and where its modules are.

A plan is computed from rules and a model's structure and changes neither. Everything downstream
reads it: the analyses judge it, the scope reports in its terms, the trees mark its modules. What
the user was shown is what happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from patchlab.mapping.rules import PatchMapping, PatchRule


@dataclass(frozen=True, slots=True)
class Replacement:
    """One original class whose modules one rule replaces.

    Attributes:
        rule: The rule that decides the class.
        original: The class that is replaced.
        fqns: Where its modules are in the target, in the order of `named_modules`; the root is "".
    """

    rule: PatchRule
    original: type[nn.Module]
    fqns: tuple[str, ...]

    @property
    def key(self) -> str:
        """The key of the rule."""
        return self.rule.key

    @property
    def replacement(self) -> type[nn.Module]:
        """The class that takes the original's place."""
        return self.rule.replacement

    @property
    def summary(self) -> str:
        """The replacement in a line: `12 × BertSelfAttention → MyAttention`."""
        return f"{len(self.fqns)} × {self.original.__name__} → {self.replacement.__name__}"


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """What a mapping replaces in one target.

    Attributes:
        mapping: The rules, in order.
        replacements: One for each pair of rule and class, in the order of the first module.
    """

    mapping: PatchMapping
    replacements: tuple[Replacement, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Key → number of modules replaced, 0 included, in the order of the rules."""
        return counts_of(self.mapping, self.replacements)

    @cached_property
    def fqns(self) -> dict[str, Replacement]:
        """FQN → the replacement that takes place there."""
        return {fqn: replacement for replacement in self.replacements for fqn in replacement.fqns}

    def __iter__(self) -> Iterator[Replacement]:
        return iter(self.replacements)

    def __len__(self) -> int:
        return len(self.replacements)


def counts_of(mapping: PatchMapping, replacements: Iterable[Replacement]) -> dict[str, int]:
    """Return key → number of modules, 0 included, in the order of the rules."""
    counts = {rule.key: 0 for rule in mapping}
    for replacement in replacements:
        counts[replacement.key] += len(replacement.fqns)
    return counts


def grouped(
    modules: Iterable[tuple[str, type[nn.Module], PatchRule]],
) -> tuple[Replacement, ...]:
    """Group modules (FQN, original class, rule) into replacements, in order of appearance."""
    groups: dict[tuple[str, type[nn.Module]], tuple[PatchRule, list[str]]] = {}
    for fqn, original, rule in modules:
        groups.setdefault((rule.key, original), (rule, []))[1].append(fqn)
    return tuple(
        Replacement(rule, original, tuple(fqns)) for (_, original), (rule, fqns) in groups.items()
    )
