"""Parts of a module that are not as its constructor leaves them, and are to outlive a swap.

A live model has been worked on: an earlier swap or an adapter put another class in the place of a
part, a layer was quantized, weight norm was added. A new container is built from the constructor's
arguments and knows nothing of that. Where it has, in the same place, just what the original would
have had, the live part is put in instead. Where it has something of its own, that is meant, and the
part which is lost is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patchlab.apply.parametrized import class_of, computed_tensors, made_from, move_computed
from patchlab.apply.swap_build import Built
from patchlab.apply.swap_recipes import plain_original
from patchlab.apply.tensor_names import joined
from patchlab.errors import SwapError
from patchlab.mapping.rules import PatchMapping

_SETTING = bool | int | float | str | torch.dtype | torch.Size | None
# What a swap carries over elsewhere, or leaves behind and says so.
_NO_SETTING = frozenset(
    {
        "training",
        "forward",
        "_old_forward",
        "_hf_hook",
        "_compiled_call_impl",
        "_is_full_backward_hook",
        "_is_hf_initialized",
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "_can_record_outputs",
        "_weight_conversions",
    }
)
_HELD = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False, slots=True)
class Parts:
    """What became of the parts of one old module that had been changed.

    Attributes:
        kept: Paths of those that are in the new module too.
        lost: Those that are not, each as a phrase.
    """

    kept: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def keep_parts(built: Built, mapping: PatchMapping, live: frozenset[int]) -> Parts:
    """Bring the changed parts of a site's old module into the new one; the old is not changed.

    Args:
        built: A new module, still without tensors.
        mapping: The rules of the swap, under which it was built.
        live: Ids of the modules of the model; those are not looked into.

    Raises:
        SwapError: A tensor is computed from others in a way that the new module has no place for.
    """
    parts = Parts()
    if built.finished or built.recipe is None:
        return parts
    original: nn.Module | None = None
    for parent, name, path, new, old in _pairs(built, live):
        computed = set(computed_tensors(old)) - set(computed_tensors(new))
        changed = parent is not None and class_of(new) is not _expected(old, mapping)
        other = _differences(old, new)
        if not computed and not changed and not other:
            continue
        if original is None:
            try:
                original = plain_original(built.recipe)
            except Exception:  # noqa: BLE001  (the user's constructor, called once more)
                return parts
        plain = _at(original, path)
        if plain is None:
            continue
        computed -= set(computed_tensors(plain))
        if computed or (changed and class_of(old) is not class_of(plain)):
            if parent is not None and _means_the_original(new, plain, mapping):
                parent._modules[name] = old
                parts.kept.append(path)
                continue
            if class_of(old) is not class_of(plain):
                parts.lost.append(f"{joined(built.site.fqn, path)} (a {type(old).__name__})")
                continue
            left = move_computed(old, new, _shapes_of(plain))
            if left:
                raise _no_place(built, path, left[0], new)
        if class_of(old) is class_of(plain):
            _carry_changes(old, new, plain, other)
    return parts


def _differences(old: nn.Module, new: nn.Module) -> list[str]:
    """List what an old module has and a new one has not, or has with another value."""
    there, here = vars(old), vars(new)
    names = [
        name
        for name, value in there.items()
        if name not in here
        or (value is not here[name] and isinstance(value, _SETTING) and value != here[name])
    ]
    for held in _HELD:
        mine, its = there[held], here[held]
        for name in {**mine, **its} if mine.keys() != its.keys() else mine:
            if (mine.get(name) is None) is not (its.get(name) is None):
                names.append(name)
    return [name for name in names if name not in _NO_SETTING] if names else names


def _carry_changes(old: nn.Module, new: nn.Module, plain: nn.Module, names: list[str]) -> None:
    """Give a new module what was added to the old one, or set on it, since its constructor ran.

    The constructor of FalconH1Model registers a buffer on a part of each layer (transformers
    5.24.0), BigBird sets the kind of attention on a live model, and so may a user.
    """
    computed = computed_tensors(old)
    skipped = {*computed, *(other for name in computed for other in made_from(old, name))}
    there, here, built = vars(old), vars(new), vars(plain)
    for name in names:
        if name in skipped or (computed and name == "parametrizations"):
            continue
        if name in there:
            meant = name in here and (name not in built or here[name] != built[name])
            if (name in here or name not in built) and not meant and not _has(new, name):
                here[name] = there[name]
            continue
        for held in _HELD:
            value, first = there[held].get(name), built[held].get(name)
            if value is not None and first is None and not _has(new, name):
                here[held][name] = value
                if name in old._non_persistent_buffers_set:
                    new._non_persistent_buffers_set.add(name)
            elif value is None and first is not None and type(here[held].get(name)) is type(first):
                # Taken off since, as MPT does with the bias of its norms.
                here[held][name] = None


def _has(module: nn.Module, name: str) -> bool:
    return any(vars(module)[held].get(name) is not None for held in _HELD)


def _shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor.shape for name, tensor in own if tensor is not None}


def _pairs(
    built: Built, live: frozenset[int]
) -> Iterator[tuple[nn.Module | None, str, str, nn.Module, nn.Module]]:
    """Yield each part of the new module that the old one has too, with its parent, top down.

    A part that is replaced, or is of the live model, is not walked into.
    """
    Entry = tuple[nn.Module | None, str, str, nn.Module, nn.Module, frozenset[int]]
    stack: list[Entry] = [(None, "", "", built.module, built.site.module, frozenset())]
    while stack:
        parent, name, path, new, old, above = stack.pop()
        yield parent, name, path, new, old
        if parent is not None and parent._modules.get(name) is not new:
            continue
        inside = above | {id(new)}
        for child_name, child in reversed(list(new._modules.items())):
            there = old._modules.get(child_name)
            if child is None or there is None or id(child) in live or id(child) in inside:
                continue
            stack.append((new, child_name, joined(path, child_name), child, there, inside))


def _means_the_original(new: nn.Module, plain: nn.Module, mapping: PatchMapping) -> bool:
    """Tell whether a part of a new module is just what the original would have there.

    So it is where a rule of this swap made something else of it: the rule is for that class, and
    not for the one that is there now.
    """
    if class_of(new) is not class_of(plain):
        rule = mapping.find(class_of(plain).__name__)
        return rule is not None and rule.replacement is class_of(new)
    return all(
        vars(new).get(name) == value
        for name, value in vars(plain).items()
        if isinstance(value, _SETTING) and name not in _NO_SETTING
    )


def _expected(old: nn.Module, mapping: PatchMapping) -> type[nn.Module]:
    """Return the class that the rules make of an unchanged part."""
    rule = mapping.find(class_of(old).__name__)
    return class_of(old) if rule is None else rule.replacement


def _at(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _no_place(built: Built, path: str, name: str, new: nn.Module) -> SwapError:
    where = joined(built.site.fqn, path) or "the root"
    replacement: Any = type(built.module)
    return SwapError(
        f"{name!r} of {where} is computed from other parameters (a parametrization, weight norm or "
        f"a pruning mask), and {type(new).__name__} has no {name!r} of that shape to be computed. "
        f"Make it permanent first (torch.nn.utils.parametrize.remove_parametrizations, "
        f"remove_weight_norm, prune.remove), or define a class method from_original(cls, original) "
        f"on {replacement.__name__}."
    )
