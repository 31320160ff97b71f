"""Containers among what a swap replaces: modules that hold others which the same rule fits (PL101).

The outermost module that a rule fits is the one that is replaced. A replacement that was meant for
what is inside then drops that, and its new weights look like a renaming that was forgotten, which
they are not. Only what is in the model at hand counts, and only if the new module is without it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from patchlab.apply.parametrized import class_of
from patchlab.apply.swap_build import Built
from patchlab.apply.swap_sites import Sites
from patchlab.apply.swap_tensors import Filled
from patchlab.apply.tensor_names import tensors_at
from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.catalog import load_catalog
from patchlab.plan.findings import Finding
from patchlab.plan.loaded import narrower
from patchlab.plan.wording import listed
from patchlab.render.numbers import count


def dropped_inside(
    built: list[Built], filled: list[Filled], mapping: PatchMapping
) -> dict[int, list[type[nn.Module]]]:
    """Return the classes that each new module drops though its own rule fits them, by its place.

    Args:
        built: The new modules.
        filled: What became of the tensors of each.
        mapping: The rules.
    """
    found = {}
    for number, item in enumerate(built):
        # Whoever gives a conversion knows what the container holds.
        if item.cloned or item.site.rule.is_exact or filled[number].converted:
            continue
        inside = {
            path: part
            for path, part in item.old_parts.items()
            if path
            and class_of(part) is not item.site.original
            and mapping.find(class_of(part).__name__) is item.site.rule
        }
        if inside and (dropped := _dropped(item, inside)):
            found[number] = dropped
    return found


def _dropped(item: Built, inside: dict[str, nn.Module]) -> list[type[nn.Module]]:
    """Return the classes of inner modules that a new module has in no form."""
    parts = {path: part for path, part in item.new_parts.items() if path}
    # It may use the weights without the module that had them.
    held = {id(tensor) for _, tensor in tensors_at(item.module)}
    dropped = []
    for path, part in inside.items():
        cls, replacement = class_of(part), item.site.rule.replacement
        # A replacement that is put in there too may build, further in, what it is in place of.
        among = [parts[path]] if isinstance(parts.get(path), replacement) else parts.values()
        is_there = any(new is part or isinstance(new, cls) for new in among)
        if not is_there and held.isdisjoint(id(tensor) for _, tensor in tensors_at(part)):
            dropped.append(cls)
    return list(dict.fromkeys(dropped))


def container_findings(
    built: list[Built], dropped: dict[int, list[type[nn.Module]]], sites: Sites
) -> list[Finding]:
    """Tell of replaced containers, once for each rule and class, with the narrower key.

    Args:
        built: The new modules.
        dropped: What `dropped_inside` found.
        sites: What the model has.
    """
    groups: dict[tuple[PatchRule, type[nn.Module]], list[int]] = {}
    for number in dropped:
        site = built[number].site
        groups.setdefault((site.rule, site.original), []).append(number)
    found = []
    for (rule, original), numbers in groups.items():
        outer = [cls.__name__ for other, cls in groups if other is rule]
        inner = sorted({cls.__name__ for number in numbers for cls in dropped[number]})
        if issubclass(rule.replacement, original):
            key = f"^{original.__name__}$"
            advice = f"To replace the container only, use {key!r}."
        else:
            advice, key = _advice(rule, outer, sites.class_names)
        name, places = rule.replacement.__name__, count(len(numbers), "module")
        found.append(
            Finding(
                "PL101",
                "error",
                rule.key,
                original.__name__,
                f"key {rule.key!r} fits {original.__name__}, and {listed(inner)} inside of it as "
                f"well. In {places} {name} takes the container's place, and what is inside goes "
                f"with it. {advice}",
                key,
            )
        )
    return found


def _advice(rule: PatchRule, outer: list[str], there: Collection[str]) -> tuple[str, str]:
    catalog = load_catalog()
    names = {name for name in there if rule.matches(name)} - {rule.replacement.__name__}
    for container in outer:
        for known in catalog.named(container):
            if known.model_type:
                numbers = catalog.model_type_classes(known.model_type)
                names |= {n for n in (catalog.names[i] for i in numbers) if rule.matches(n)}
    return narrower(rule.key, names, outer, catalog, built=there)
