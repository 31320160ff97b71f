"""What is odd about a swap: new and dropped tensors, ties, what stayed behind, dead keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from patchlab.apply.conversions import Conversions
from patchlab.apply.parametrized import class_of
from patchlab.apply.swap_build import Built
from patchlab.apply.swap_parts import Parts
from patchlab.apply.swap_sites import Sites
from patchlab.apply.swap_tensors import Filled
from patchlab.apply.tensor_names import joined, tensors_at
from patchlab.mapping.rules import PatchMapping
from patchlab.plan.dead_keys import dead_key_findings
from patchlab.plan.findings import Finding
from patchlab.plan.wording import listed

_SHOWN = 4  # As many as attention has projections.


def key_findings(mapping: PatchMapping, counts: dict[str, int], sites: Sites) -> list[Finding]:
    """Explain each key that replaced nothing."""
    found = []
    for finding in dead_key_findings(mapping, counts, sites.class_names, in_place=True):
        done = sites.done.get(finding.key, 0)
        replacement = next(rule.replacement for rule in mapping if rule.key == finding.key)
        name = replacement.__name__
        if not done:
            older = sum(_is_older(type(part), replacement) for part in sites.parts.values())
            derived = _subclass_there(finding.key, mapping, sites)
            if older:
                finding = _defined_again(finding.key, name, older)
            elif derived is not None:
                finding = derived
            found.append(finding)
            continue
        found.append(
            Finding(
                "PL104",
                "warning",
                finding.key,
                name,
                f"key {finding.key!r} replaced no module: {done} of the "
                f"modules here {'is' if done == 1 else 'are'} {name} already, as after an earlier "
                f"swap.",
            )
        )
    return found


def _is_older(cls: type[nn.Module], replacement: type[nn.Module]) -> bool:
    """Tell whether a class is what the replacement class was before it was defined again."""
    return cls is not replacement and (cls.__module__, cls.__qualname__) == (
        replacement.__module__,
        replacement.__qualname__,
    )


def _subclass_there(key: str, mapping: PatchMapping, sites: Sites) -> Finding | None:
    """Tell of a class in the model that was derived from the one that a key names."""
    rule = next(rule for rule in mapping if rule.key == key)
    for cls in dict.fromkeys(class_of(part) for part in sites.parts.values()):
        bases = [base for base in cls.__mro__[1:] if issubclass(base, nn.Module)]
        named = [base.__name__ for base in bases if rule.matches(base.__name__)]
        if named and named[0] != "Module" and mapping.find(cls.__name__) is None:
            return Finding(
                "PL104",
                "warning",
                key,
                key,
                f"key {key!r} replaced no module: the model has {cls.__name__}, a subclass of "
                f"{named[0]}, as where that has been patched or swapped. Use {cls.__name__!r}.",
                cls.__name__,
            )
    return None


def _defined_again(key: str, name: str, older: int) -> Finding:
    return Finding(
        "PL104",
        "warning",
        key,
        name,
        f"key {key!r} replaced no module: {older} of the modules here "
        f"{'is' if older == 1 else 'are'} of a class {name} that has been defined again since, as "
        f"by a cell that was run twice. Undo the earlier swap first, or swap {name!r}.",
        name,
    )


def tensor_findings(
    built: list[Built], filled: list[Filled], unplaced: int, told: Collection[int] = ()
) -> list[Finding]:
    """Tell of parameters that only the constructor gave, and of tensors that nothing holds.

    Both at once in one class mean that the weights of the model went nowhere: an error.

    Args:
        built: The new modules.
        filled: What became of the tensors of each.
        unplaced: How many tensors conversions made that came to no new module.
        told: The numbers of those of which it was told that they drop more than weights.
    """
    found = []
    rest = [number for number in range(len(built)) if number not in told]
    built, filled = [built[i] for i in rest], [filled[i] for i in rest]
    kinds = [f.constructed for f in filled], [f.dropped for f in filled], [f.awake for f in filled]
    for key, name, (new, gone, awake) in _by_class(built, *kinds):
        new_ones, gone_ones = listed(sorted(new), _SHOWN), listed(sorted(gone), _SHOWN)
        if new and (gone or unplaced):
            message = (
                f"{name} has {new_ones}, for which the model has no weights, and "
                f"{gone_ones or 'some converted weights'} of the replaced modules "
                f"went nowhere. The new ones hold what the constructor gives. If they are meant to "
                f"hold the old weights, use the old names or give a weight conversion."
                f"{_of_frozen(awake)}"
            )
            found.append(Finding("PL301", "error", key, name, message))
        elif new:
            message = (
                f"{name} has {new_ones}, for which the model has no weights: they hold what "
                f"the constructor gives.{_of_frozen(awake)}"
            )
            found.append(Finding("PL301", "warning", key, name, message))
        elif gone:
            message = (
                f"{name} has no place for {gone_ones} of the replaced modules; their weights "
                f"are not used until the swap is undone."
            )
            found.append(Finding("PL301", "warning", key, name, message))
    return found


def _of_frozen(awake: list[str]) -> str:
    if not awake:
        return ""
    return (
        f" The replaced modules are frozen; {listed(sorted(awake), _SHOWN)} "
        f"{'requires' if len(awake) == 1 else 'require'} a gradient all the same, as the class has "
        f"it."
    )


def frozen_findings(built: list[Built], filled: list[Filled]) -> list[Finding]:
    """Tell of parameters that a conversion made from frozen ones and from such as are trained."""
    return [
        Finding(
            "PL306",
            "warning",
            key,
            name,
            f"{listed(sorted(mixed), _SHOWN)} of {name} was made from frozen weights and from such "
            f"as require a gradient, and requires one as a whole.",
        )
        for key, name, (mixed,) in _by_class(built, [f.mixed for f in filled])
        if mixed
    ]


def tie_findings(parts: Mapping[str, nn.Module], built: list[Built]) -> list[Finding]:
    """Tell of parameters of a replaced module that are held outside of it too (tied weights).

    Args:
        parts: FQN → module of the model, as it is before the swap.
        built: The new modules.
    """
    inside = {id(part) for b in built for part in b.old_parts.values()}
    outside: dict[int, str] = {}
    for fqn, module in parts.items():
        if module._parameters and id(module) not in inside:
            for name, own in module._parameters.items():
                if own is not None:
                    outside.setdefault(id(own), f"{fqn}.{name}" if fqn else name)
    for item in built:
        for name, held_here in item.old_tensors.items():
            if isinstance(held_here, nn.Parameter):
                outside.setdefault(id(held_here), joined(item.site.fqn, name))
    found = []
    for item in built:
        site = item.site
        held: dict[int, list[str]] | None = None
        for name, parameter in item.old_tensors.items():
            if not isinstance(parameter, nn.Parameter):
                continue
            full = joined(site.fqn, name)
            tied = outside.get(id(parameter), full)
            if tied == full or not site.fqn or tied.startswith(f"{site.fqn}."):
                continue
            if held is None:
                held = {}
                for new_name, tensor in tensors_at(item.module):
                    held.setdefault(id(tensor), []).append(new_name)
            if name in held.get(id(parameter), ()):
                severity, what = "info", "still is: the two share one parameter"
            elif id(parameter) in held:
                severity, what = (
                    "warning",
                    f"still is, but under the name {held[id(parameter)][0]!r}, which transformers "
                    f"does not know to be tied: save_pretrained refuses to write one tensor under "
                    f"two such names. Loaded without the patch it would be dropped, and the tied "
                    f"weight used. Undo the swap to save",
                )
            else:
                severity, what = (
                    "warning",
                    "is no more. tie_weights() and resize_token_embeddings() would tie it again "
                    "by its name, and saved and loaded without the patch the tied weight is used. "
                    "To untie for good set config.tie_word_embeddings = False",
                )
            message = f"{full} was tied to {tied} and {what}."
            found.append(Finding("PL304", severity, site.rule.key, full, message))  # type: ignore[arg-type]
    return found


def part_findings(built: list[Built], parts: list[Parts]) -> list[Finding]:
    """Tell of parts that had been changed in the live model: kept as they are, or lost."""
    found = []
    of_parts = [p.kept for p in parts], [p.lost for p in parts]
    for key, name, (kept, lost) in _by_class(built, *of_parts):
        if kept:
            message = (
                f"{name} keeps {listed(kept, _SHOWN)} of the modules in whose place it is: they "
                f"were changed after the model was built (an earlier swap, an adapter, a "
                f"parametrization), and the very same objects are used on."
            )
            found.append(Finding("PL306", "info", key, name, message))
        if lost:
            message = (
                f"{listed(lost, _SHOWN)} was put there after the model was built, and {name} has "
                f"a part of its own in that place: what was there is not used until the swap is "
                f"undone."
            )
            found.append(Finding("PL306", "warning", key, name, message))
    return found


def left_findings(built: list[Built], left: dict[int, list[str]]) -> list[Finding]:
    """Tell of hooks and the like that could not follow to a new module."""
    return [
        Finding(
            "PL306",
            "warning",
            key,
            name,
            f"{listed(phrases, _SHOWN)} did not follow to {name}, and "
            f"{'does' if len(phrases) == 1 else 'do'} not run until the swap is undone.",
        )
        for key, name, (phrases,) in _by_class(built, [left.get(i, ()) for i in range(len(built))])
        if phrases
    ]


def conversion_findings(model: nn.Module, conversions: Conversions) -> list[Finding]:
    """Tell of conversions that are given for a model type or class that is not there."""
    if not conversions:
        return []
    names = {type(model).__name__}
    for module in model.modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        names |= {type(module).__name__, model_type or type(module).__name__}
    return [
        Finding(
            "PL305",
            "warning",
            "",
            name,
            f"conversions are given for {name!r}, and the model has no such model type or class, "
            f"so they are not used. Its model type is "
            f"{getattr(getattr(model, 'config', None), 'model_type', None)!r}, its class "
            f"{type(model).__name__!r}.",
        )
        for name in conversions
        if name not in names
    ]


def _by_class(
    built: list[Built], *told: Sequence[Iterable[str]]
) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Yield, by rule and replacement class, what is told of its sites, each thing once.

    Args:
        built: The new modules.
        told: For each kind of thing, a sequence as long as `built`.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for i, item in enumerate(built):
        rule = item.site.rule
        groups.setdefault((rule.key, rule.replacement.__name__), []).append(i)
    for (key, name), places in groups.items():
        yield key, name, [list(dict.fromkeys(n for i in places for n in kind[i])) for kind in told]
