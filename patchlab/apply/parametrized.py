"""Parameters that are computed from others: parametrizations, weight norm, pruning masks.

torch has two ways. `torch.nn.utils.parametrize` gives the module a class of its own, with a
property for the tensor and a child `parametrizations` that holds what it is computed from. The
older functions (`weight_norm`, `spectral_norm`, pruning; torch 2.13.0) put a hook in front of the
forward that sets a plain attribute `weight` from parameters named `weight_g`, `weight_orig`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

_HOLDER = "parametrizations"


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, not the one that torch makes for a parametrized one."""
    if _HOLDER in module._modules and parametrize.is_parametrized(module):
        return parametrize.type_before_parametrizations(module)
    return type(module)


def computed_tensors(module: nn.Module) -> tuple[str, ...]:
    """List the names of a module's own parameters and buffers that are computed from others."""
    names: list[str] = []
    if _HOLDER in module._modules and parametrize.is_parametrized(module):
        names += list(module._modules[_HOLDER]._modules)  # type: ignore[union-attr]
    for hook in module._forward_pre_hooks.values():
        # `name` of WeightNorm and SpectralNorm, `_tensor_name` of every pruning method.
        name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
        if isinstance(name, str) and isinstance(vars(module).get(name), torch.Tensor):
            names.append(name)
    return tuple(dict.fromkeys(names))


def made_from(module: nn.Module, name: str) -> list[str]:
    """List the module's own parameters and buffers that a computed tensor is made from."""
    own = [*module._parameters, *module._buffers]
    return [other for other in own if other.startswith(f"{name}_")]


def move_computed(old: nn.Module, new: nn.Module, wanted: dict[str, torch.Size]) -> list[str]:
    """Let a new module compute its tensors as the old one does, by the very same objects.

    Hooks are not moved here.

    Args:
        old: The module that computes some of its tensors.
        new: The module that is to.
        wanted: Name of a tensor → its shape in the module before it was parametrized.

    Returns:
        The names that could not be moved: the new module has no such tensor of that shape.
    """
    left = []
    for name in computed_tensors(old):
        there: torch.Tensor | None = new._parameters.get(name)
        if there is None:
            there = new._buffers.get(name)
        if there is None or there.shape != wanted.get(name):
            if name not in computed_tensors(new):
                left.append(name)
            continue
        holder = old._modules.get(_HOLDER)
        if holder is not None and name in holder._modules:
            # Registering any gives the new module its class and property; then it takes the old
            # module's own list, with the very parameters and parametrizations.
            parametrize.register_parametrization(new, name, nn.Identity(), unsafe=True)
            new._modules[_HOLDER]._modules[name] = holder._modules[name]  # type: ignore[union-attr]
        else:
            new._parameters.pop(name, None)
            new._buffers.pop(name, None)
            for other in made_from(old, name):
                if other in old._parameters:
                    new._parameters[other] = old._parameters[other]
                else:
                    new._buffers[other] = old._buffers[other]
                    if other in old._non_persistent_buffers_set:
                        new._non_persistent_buffers_set.add(other)
            vars(new)[name] = vars(old)[name]
    return left
