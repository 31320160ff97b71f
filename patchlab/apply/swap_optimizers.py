"""Optimizers around a swap: those that hold parameters the model does not use, or miss new ones.

An optimizer is made from a list of parameters, and never looks at the model again. What a swap puts
in and takes out it does not see.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from patchlab.apply.swap_build import Built
from patchlab.apply.tensor_names import joined, parts_of, tensors_at
from patchlab.model.classes import subclasses_of
from patchlab.plan.findings import Finding
from patchlab.plan.wording import listed

_SHOWN = 4  # As many as attention has projections.


def optimizer_findings(parts: Iterable[nn.Module], built: list[Built]) -> list[Finding]:
    """Tell of optimizers that hold what the model will not use any more, and that miss what is new.

    Args:
        parts: Every module of the model, as it is before the swap.
        built: The new modules with their tensors.
    """
    made = [item for item in built if not item.cloned]
    if not made:
        return []
    gone: dict[int, str] = {}
    for item in made:
        gone.update(_only_in_old(item))
    before = {id(own) for part in parts for own in part._parameters.values()}
    new = {
        id(tensor): joined(item.site.fqn, name)
        for item in made
        for name, tensor in tensors_at(item.module)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) not in before
    }
    if not gone and not new:
        return []
    found = []
    optimizers = list(_optimizers())
    for _, held in optimizers:
        for number in held:
            new.pop(number, None)
    for optimizer, held in optimizers:
        stale = [gone[number] for number in held if number in gone]
        name = type(optimizer).__name__
        if stale:
            found.append(
                _finding(
                    name,
                    f"a {name} holds {listed(stale, _SHOWN)}, which the model does not use after "
                    f"the swap, and not the parameters in their place. Make the optimizer after "
                    f"the swap.",
                )
            )
        elif new and not before.isdisjoint(held):
            found.append(
                _finding(
                    name,
                    f"a {name} trains this model, and no optimizer holds "
                    f"{listed(list(new.values()), _SHOWN)}, which the swap puts in: no step "
                    f"changes what is new. Make the optimizer after the swap, or use its "
                    f"add_param_group.",
                )
            )
    return found


def undone_findings(model: nn.Module, built: list[Built]) -> list[Finding]:
    """Tell of optimizers that hold parameters in whose place a swap that is undone had others.

    Args:
        model: The model, with the old modules back in it.
        built: The modules that the swap had put in.
    """
    # Where the new module only had more than the old one, its optimizer trains all of the old one.
    items = [item for item in built if not item.cloned and _only_in_old(item)]
    if not items:
        return []
    now = {id(own) for part in parts_of(model).values() for own in part._parameters.values()}
    gone = {
        id(tensor): joined(item.site.fqn, name)
        for item in items
        for name, tensor in tensors_at(item.module)
        if isinstance(tensor, nn.Parameter) and id(tensor) not in now
    }
    if not gone:
        return []
    found = []
    for optimizer, held in _optimizers():
        stale = [gone[number] for number in held if number in gone]
        if stale:
            name = type(optimizer).__name__
            found.append(
                _finding(
                    name,
                    f"a {name} holds {listed(stale, _SHOWN)}, which the model does not use since "
                    f"the swap was undone, and not the parameters in their place. Make an "
                    f"optimizer anew.",
                )
            )
    return found


def _only_in_old(item: Built) -> dict[int, str]:
    """Return the parameters of an old module that the new one does not hold, by id."""
    held = {id(tensor) for _, tensor in tensors_at(item.module)}
    return {
        id(tensor): joined(item.site.fqn, name)
        for name, tensor in item.old_tensors.items()
        if isinstance(tensor, nn.Parameter) and id(tensor) not in held
    }


def _optimizers() -> Iterator[tuple[torch.optim.Optimizer, list[int]]]:
    """Yield each optimizer that is alive, with the ids of what it holds."""
    # The only way to an optimizer is the garbage collector's list of all objects. `type(...) in`
    # and not isinstance, which is eight times slower and would ask lazy proxies for their class.
    classes = {torch.optim.Optimizer, *subclasses_of(torch.optim.Optimizer)}
    for candidate in [found for found in gc.get_objects() if type(found) in classes]:
        groups = getattr(candidate, "param_groups", [])
        yield candidate, list(dict.fromkeys(id(p) for group in groups for p in group["params"]))


def _finding(name: str, message: str) -> Finding:
    return Finding("PL306", "warning", "", name, message)
