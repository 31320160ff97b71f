"""Keys that replaced nothing (PL104) and rules that never decide (PL105), with the reason.

A key can be dead for many reasons, and each wants something else done: the class is torch's, the
key is a part of a name, the class is one of another model, the name is misspelled, or nothing is
near. Whether a class exists is asked of the catalog and not of what happens to be imported, and a
suggestion is a class of the target wherever one is near.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from patchlab.mapping.matching import explain_match, near_names
from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.model.classes import loaded_module_classes
from patchlab.plan.containers import fitting_numbers
from patchlab.plan.findings import Finding
from patchlab.plan.wording import listed

_WORDS = re.compile(
    r"(?<!\\)[A-Za-z]{2,}"
)  # what a pattern says literally, such as "MLP" in ".*MLP"


@dataclass(frozen=True, slots=True)
class _Target:
    """What a key was meant for.

    Attributes:
        own: Names of its classes that can be replaced, those of `home` first, then of `relatives`.
        home: Names of the classes of the model type of the whole, and not of a tower in it.
        relatives: Names of the classes of its model types, in the target or not.
        catalog: Every class of the installed transformers.
        absence: How to say that it has none of some classes.
        in_place: Whether modules of any class are replaced, in a model that is built.
    """

    own: tuple[str, ...]
    home: frozenset[str]
    relatives: frozenset[str]
    catalog: Catalog
    absence: str
    in_place: bool


def dead_key_findings(
    mapping: PatchMapping,
    counts: dict[str, int],
    class_names: Collection[str],
    *,
    catalog: Catalog | None = None,
    several_models: bool = False,
    in_place: bool = False,
) -> tuple[Finding, ...]:
    """Explain each key whose count is 0, and each rule that others always come before.

    Args:
        mapping: The rules.
        counts: Key → number of modules replaced.
        class_names: The names of the classes of the modules at hand, before the patch.
        catalog: Every class of the installed transformers; loaded if None and a key is dead.
        several_models: Whether the classes are those of more than one model.
        in_place: Whether modules of any class, torch's too, are replaced in a built model.

    Raises:
        CatalogError: A key is dead, and there is no transformers that could be read.
    """
    findings = []
    target: _Target | None = None
    shadowed = _shadowed_by(mapping, class_names)
    for rule in mapping:
        if counts.get(rule.key, 0):
            continue
        if rule.key in shadowed:
            names, winners = shadowed[rule.key]
            findings.append(_never_decides(rule, names, winners))
        else:
            if target is None:
                catalog = catalog or load_catalog()
                target = _target_of(class_names, catalog, several_models, in_place)
            findings.append(_dead(rule, class_names, target))
    return tuple(findings)


def unknown_key_findings(mapping: PatchMapping, *, progress: bool = True) -> tuple[Finding, ...]:
    """Return a PL104 for each key that no class of the installed transformers has: a typo.

    What can be said of a key before a model is known. The catalog is read only if there is a key
    that fits no class that is loaded.

    Args:
        mapping: The rules.
        progress: As for `load_catalog`.

    Raises:
        CatalogError: Such a key is there, and no transformers that could be read.
    """
    loaded = {cls.__name__ for cls in loaded_module_classes()}
    rules = [rule for rule in mapping if not any(map(rule.matches, loaded))]
    if not rules:
        return ()
    catalog = load_catalog(progress=progress)
    unknown = PatchMapping(tuple(r for r in rules if not fitting_numbers(r.key, catalog)))
    # With torch's, since most models have some: a key of theirs is no typo, and just as dead.
    names = frozenset((*catalog.names, *_torch_class_names()))
    return dead_key_findings(unknown, {}, names, catalog=catalog, several_models=True)


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


def _target_of(
    class_names: Collection[str], catalog: Catalog, several_models: bool, in_place: bool
) -> _Target:
    known = {cls.__name__ for cls in loaded_module_classes()} | {*catalog.names}
    present = (known & {*class_names}) - {*_torch_class_names()}
    numbers = [c.number for name in present for c in catalog.named(name)]
    relatives = _names_of_types(numbers, catalog)
    held = catalog.containment.reachable(numbers)
    outer = (n for n in numbers if not held >> n & 1 and catalog[n].is_pretrained_model)
    home = _names_of_types(outer, catalog)
    replaced = {*class_names} if in_place else present
    return _Target(
        own=tuple(sorted(replaced, key=lambda n: (n not in home, n not in relatives, n))),
        home=home,
        relatives=relatives,
        catalog=catalog,
        absence=", of which no model here has a module"
        if several_models
        else "; this model has none",
        in_place=in_place,
    )


def _names_of_types(numbers: Iterable[int], catalog: Catalog) -> frozenset[str]:
    """Return the names of every class of the model types that some classes are of."""
    types = {catalog.model_type(number) for number in numbers} - {""}
    return frozenset(
        name for number, name in enumerate(catalog.names) if catalog.model_type(number) in types
    )


def _dead(rule: PatchRule, class_names: Collection[str], target: _Target) -> Finding:
    reason, suggestion = _reason(rule, class_names, target)
    return Finding(
        "PL104",
        "warning",
        rule.key,
        rule.key,
        f"key {rule.key!r} replaced no module: {reason}",
        suggestion,
    )


def _reason(rule: PatchRule, class_names: Collection[str], target: _Target) -> tuple[str, str]:
    """Return why a key is dead, and the class that was probably meant, "" if that is not known."""
    key, own = rule.key, rule.replacement.__name__
    if own in class_names and rule.replacement in loaded_module_classes() and rule.matches(own):
        return f"{own} is what the model has there already. Give another class.", ""
    elsewhere = _existing(rule, target)
    in_torch = sorted(name for name in _torch_class_names() if rule.matches(name))
    torch_here = [name for name in in_torch if name in class_names]
    containing = _containing(key, target) if rule.is_exact else []
    if not target.in_place and (torch_here or (in_torch and not elsewhere and not containing)):
        named = torch_here or in_torch
        return (
            f"{listed(named)} {'is' if len(named) == 1 else 'are'} torch's own, and only "
            f"classes of transformers are replaced at construction. To replace these modules in a "
            f"model that is built, swap them in place."
        ), ""
    present = sorted(name for name in class_names if rule.matches(name))
    if present:
        are = "is" if len(present) == 1 else "are"
        if not {*present} <= {*target.own}:
            return (
                f"{listed(present)} {are} in the model, but only classes of transformers are "
                f"replaced at construction. To replace these modules, swap them in place."
            ), ""
        return (
            f"{listed(present)} {are} in the model, but another rule decides there: one of an "
            f"inner scope, or one that replaces a module around it."
        ), ""
    what = (
        elsewhere
        or (f"the model has no {listed(in_torch)} of torch" if in_torch else "")
        or _no_module(rule, target.catalog)
        or "no class has such a name"
    )
    if containing:
        part = _part_of(containing[0], key)
        return (
            f"{what}. An identifier is an exact name, and {listed(containing)} "
            f"{'has' if len(containing) == 1 else 'have'} more to it. Did you mean "
            f"{containing[0]!r}? '.*{part}' would search for every name with {part} in it."
        ), containing[0]
    if not rule.is_exact and (folded := _in_another_case(key, target.own)):
        names, spelled = folded
        return (
            f"{what}. Names are case-sensitive: the model has {listed(names)}. Did you mean "
            f"{spelled!r}?"
        ), spelled
    near = near_names(key, target.own)
    if not near and not elsewhere and not _no_module(rule, target.catalog):
        # A name that merely contains the key is no misspelling of it.
        near = near_names(key, target.relatives) or near_names(
            key, [name for name in target.catalog.names if key not in name]
        )
    if near:
        same = near[0].casefold() == key.strip("^$").casefold()
        case = " Names are case-sensitive." if same else ""
        return f"{what}. Did you mean {near[0]!r}?{case}", near[0]
    # A survey asks of the whole library, which has no three classes worth naming.
    if target.own and len(target.own) < len(target.catalog) / 2:
        such_as = listed(target.own[:3])
        return f"{what}. Use the name of a class in the model, such as {such_as}.", ""
    return f"{what}. Look the name up in the tree of the model (patchlab.module_tree).", ""


def _existing(rule: PatchRule, target: _Target) -> str:
    """Say which classes a key fits outside of the target, "" if none."""
    catalog = target.catalog
    numbers = fitting_numbers(rule.key, catalog)
    loaded = {cls.__name__ for cls in loaded_module_classes() if rule.matches(cls.__name__)}
    names = sorted(loaded | {catalog.names[number] for number in numbers})
    if not names:
        return ""
    types = sorted({catalog.model_type(number) for number in numbers} - {""})
    one = len(names) == 1
    return (
        f"{listed(names)} {'is a class' if one else 'are classes'} of "
        f"{listed(types) or 'transformers'}{target.absence}"
    )


def _no_module(rule: PatchRule, catalog: Catalog) -> str:
    names = [name for name in catalog.other_names if rule.matches(name)]
    if not names:
        return ""
    return f"{listed(names)} {'is no module class' if len(names) == 1 else 'are no module classes'}"


def _containing(key: str, target: _Target) -> list[str]:
    """Return the target's names that contain a key.

    Those that end with it come first, of these the model's own and not those of a tower in it, then
    the shortest. Names that contain it in another case are asked only if none has it as written.
    """
    folded = key.casefold()
    found = [name for name in target.own if key in name] or [
        name for name in target.own if folded in name.casefold() and folded != name.casefold()
    ]
    return sorted(
        found, key=lambda n: (not n.casefold().endswith(folded), n not in target.home, len(n), n)
    )


def _in_another_case(key: str, names: Collection[str]) -> tuple[list[str], str] | None:
    """Return the names that a pattern fits in another case, and the pattern in theirs.

    None if there are none, or the pattern itself is spelled in a way that cannot be followed.
    """
    found = sorted(name for name in names if re.search(key, name, re.IGNORECASE))
    for name in found:
        spelled = _WORDS.sub(lambda word: _part_of(name, word[0]) or word[0], key)  # noqa: B023
        if re.search(spelled, name):
            return found, spelled
    return None


def _part_of(name: str, key: str) -> str:
    """Return a key as a name spells it, "" if the name does not contain it."""
    start = name.casefold().rfind(key.casefold())
    return name[start : start + len(key)] if start >= 0 else ""


def _torch_class_names() -> list[str]:
    return [name for name, value in vars(torch.nn).items() if isinstance(value, type)]
