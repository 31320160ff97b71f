"""Keys that replaced nothing (PL104) and rules that never decide (PL105), with the reason.

A key can be dead for many reasons, and each wants something else done: the class is torch's, the
name differs in case, the class exists but is not in this model, or nothing is near.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from patchlab.mapping.matching import explain_match, near_names
from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.classes import loaded_module_classes
from patchlab.plan.findings import Finding
from patchlab.plan.wording import listed


def dead_key_findings(
    mapping: PatchMapping,
    counts: dict[str, int],
    class_names: Collection[str],
    *,
    known_names: Iterable[str] = (),
) -> tuple[Finding, ...]:
    """Explain each key whose count is 0, and each rule that others always come before.

    Args:
        mapping: The rules.
        counts: Key → number of modules replaced.
        class_names: The names of the classes of the modules at hand, before the patch.
        known_names: Further names that keys may have been meant for, such as the catalog's.
    """
    findings = []
    shadowed = _shadowed_by(mapping, class_names)
    for rule in mapping:
        if counts.get(rule.key, 0):
            continue
        if rule.key in shadowed:
            names, winners = shadowed[rule.key]
            findings.append(_never_decides(rule, names, winners))
        else:
            findings.append(_dead(rule, class_names, known_names))
    return tuple(findings)


def _shadowed_by(
    mapping: PatchMapping, class_names: Collection[str]
) -> dict[str, tuple[list[str], list[str]]]:
    """Key → the names it fits in vain, and the keys that decide those names."""
    shadowed: dict[str, tuple[list[str], list[str]]] = {}
    for name in sorted(set(class_names)):
        match = explain_match(name, mapping)
        for other in match.shadowed:
            names, winners = shadowed.setdefault(other.key, ([], []))
            names.append(name)
            if match.rule is not None and match.rule.key not in winners:
                winners.append(match.rule.key)
    return shadowed


def _never_decides(rule: PatchRule, names: list[str], winners: list[str]) -> Finding:
    return Finding(
        "PL105",
        "warning",
        rule.key,
        names[0],
        f"key {rule.key!r} fits {listed(names)}, but {listed([repr(w) for w in winners])} "
        f"{'decides' if len(winners) == 1 else 'decide'} there: an exact name comes first, then "
        f"the first pattern that fits. Remove this rule, or put it before the other.",
    )


def _dead(rule: PatchRule, class_names: Collection[str], known_names: Iterable[str]) -> Finding:
    loaded_classes = set(loaded_module_classes())
    loaded = {cls.__name__ for cls in loaded_classes}
    elsewhere = sorted(name for name in loaded if rule.matches(name))
    in_torch = sorted(name for name in _torch_class_names() if rule.matches(name))
    suggestion = ""
    own = rule.replacement.__name__
    if own in class_names and rule.replacement in loaded_classes and rule.matches(own):
        reason = f"{own} is what the model has there already. Give another class."
    elif in_torch:
        reason = (
            f"{listed(in_torch)} {'is' if len(in_torch) == 1 else 'are'} torch's own, and only "
            f"classes of transformers are replaced at construction. To replace these modules in a "
            f"model that is built, swap them in place."
        )
    elif elsewhere:
        reason = (
            f"it fits {listed(elsewhere)}, of which no model here has a module. Use the name of a "
            f"class in the model, such as {listed(sorted(class_names)[:3]) or 'its own'}."
        )
    else:
        near = near_names(rule.key, class_names) or near_names(rule.key, {*loaded, *known_names})
        if near:
            suggestion = near[0]
            same = near[0].casefold() == rule.key.strip("^$").casefold()
            reason = (
                f"no class has such a name. Did you mean {near[0]!r}? "
                f"{'Names are case-sensitive.' if same else ''}"
            ).rstrip()
        else:
            reason = (
                "no class has such a name. Look the name up in the tree of the model "
                "(patchlab.module_tree)."
            )
    return Finding(
        "PL104",
        "warning",
        rule.key,
        rule.key,
        f"key {rule.key!r} replaced no module: {reason}",
        suggestion,
    )


def _torch_class_names() -> list[str]:
    return [name for name, value in vars(torch.nn).items() if isinstance(value, type)]
