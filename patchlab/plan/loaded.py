"""Over-matches among the classes that are loaded, told without a model: what a scope can know.

A scope opens before it is known what will be built. What its rules would do to the classes that are
loaded is read off the catalog; a rule that matches one class alone cannot be trapped, and costs
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.model.classes import matched_classes
from patchlab.plan.containers import Container, find_containers
from patchlab.plan.findings import Finding, ordered
from patchlab.plan.readings import are_of_several_kinds
from patchlab.plan.suggest import READABLE, suggest_key
from patchlab.plan.wording import listed
from patchlab.render.numbers import count


def loaded_overmatches(
    mapping: PatchMapping, classes: Collection[type[nn.Module]] | None = None
) -> tuple[Finding, ...]:
    """Return a PL101 for each pattern and Python module in which it matches a container.

    Args:
        mapping: The rules.
        classes: The originals to judge, such as those that were replaced; all that are loaded if
            None.
    """
    matched = matched_classes(mapping)
    wanted = set(matched if classes is None else classes)
    suspects: dict[PatchRule, set[str]] = {}
    for rule in mapping:
        if rule.is_exact:
            continue
        mine = [cls for cls, decides in matched.items() if decides is rule]
        modules = {cls.__module__ for cls in mine}
        for cls in mine:
            siblings = sum(other.__module__ == cls.__module__ for other in mine)
            if cls in wanted and (siblings > 1 or len(modules) > 1):
                suspects.setdefault(rule, set()).add(f"{cls.__module__}.{cls.__qualname__}")
    if not suspects:
        return ()
    catalog = load_catalog()
    found: list[Finding] = []
    for rule, names in suspects.items():
        # One rule at a time: what another rule replaces inside may well be built by this one's.
        alone = PatchMapping((rule,))
        by_module: dict[str, list[Container]] = {}
        for container in find_containers(alone, catalog, scope=names):
            by_module.setdefault(container.python_module, []).append(container)
        found += (_finding(rule, module, held, catalog) for module, held in by_module.items())
    return ordered(found)


def _finding(
    rule: PatchRule, python_module: str, held: list[Container], catalog: Catalog
) -> Finding:
    names = [
        name
        for number, name in enumerate(catalog.names)
        if catalog.python_module(number) == python_module and rule.matches(name)
    ]
    folder = next(c.model_type for c in catalog.named(held[0].class_name))
    reachable = _names(catalog, catalog.model_type_classes(folder)) if folder else set(names)
    first = held[0]
    advice, key = narrower(
        rule.key,
        [name for name in reachable if rule.matches(name)],
        [container.class_name for container in held],
        catalog,
    )
    others = f" So are {listed([c.class_name for c in held[1:]])}." if len(held) > 1 else ""
    return Finding(
        "PL101",
        "error",
        rule.key,
        first.class_name,
        f"key {rule.key!r} matches {count(len(names), 'class', 'classes')} in {python_module}: "
        f"{listed(names, 6)}. {first.class_name} is a container of {listed(first.inner)}: "
        f"replacing both drops the inner one.{others} {advice}",
        key,
    )


def narrower(
    key: str,
    names: Iterable[str],
    containers: Collection[str],
    catalog: Catalog,
    *,
    built: Collection[str] = (),
) -> tuple[str, str]:
    """Return what to do about containers, as a sentence, and the narrower key, "" if there is none.

    Args:
        key: The key that matches too much.
        names: The classes that it matches.
        containers: Those of them that are containers.
        catalog: The classes of the installed transformers.
        built: Names of the classes of a model, if there is one.
    """
    suggestion = suggest_key(key, names, containers, catalog, built_classes=built)
    if suggestion is None:
        return "Use the names of the classes to replace.", ""
    if are_of_several_kinds(suggestion.keeps, key) or len(suggestion.key) > 2 * READABLE:
        named = listed(suggestion.keeps, 6)
        return f"Without the containers it fits {named}: name those you mean.", suggestion.key
    return f"To replace the inner classes only, use {suggestion.key!r}.", suggestion.key


def _names(catalog: Catalog, numbers: Iterable[int]) -> set[str]:
    return {catalog.names[number] for number in numbers}
