"""What a module carries beside its tensors, brought from an old module to the one in its place.

Hooks are shared as the very dicts that hold them, so a handle taken before the swap still removes
its hook, and one registered during the swap is there after the undo. The training flag, gradient
checkpointing and accelerate's hooks follow path by path. What cannot follow is named.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from patchlab.apply.swap_build import Built
from patchlab.apply.swap_offload import HOOK, carry_accelerate
from patchlab.apply.swap_recipes import Skeleton
from patchlab.apply.tensor_names import joined

_CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def carry_state(built: Built, live: frozenset[int] = frozenset()) -> list[str]:
    """Bring flags, hooks and configs from the old module of a site, and its parts, to the new.

    A new module that holds the old one, or any other of the model, leaves that as it is: its hooks
    run where it is called.

    Args:
        built: The new module, with its tensors.
        live: Ids of the modules of the model.

    Returns:
        What could not follow, one phrase each.
    """
    old_parts, new_parts = built.old_parts, built.new_parts
    inside = {id(part) for part in new_parts.values()}
    left: list[str] = []
    for path, new in new_parts.items():
        if id(new) in live:
            continue
        old = old_parts.get(path)
        _set_training(new, path, old, old_parts)
        _share_configs(new, old, built.skeleton)
        if old is not None and id(old) not in inside:
            left += [f"{what} of {_named(built, path)}" for what in _carry_hooks(old, new)]
            _carry_checkpointing(old, new)
    for path, old in old_parts.items():
        if path not in new_parts and id(old) not in inside:
            left += [f"{what} of {_named(built, path)}" for what in _own_hooks(old)]
    return left


def shared_parts(
    built: Built, owner: nn.Module, skeleton: Skeleton, new_of: dict[int, nn.Module]
) -> None:
    """Put the live module where the new one was given a part of the skeleton it was built from.

    T5 hands its embedding to the constructors of both stacks: in a new stack that part is the
    skeleton's, and has to be the model's own.

    Args:
        built: A new module.
        owner: The model it is for.
        skeleton: The structure of the owner.
        new_of: Id of an old module that is replaced too → the new one in its place.
    """
    for parent in list(built.module.modules()):
        for name, child in list(parent._modules.items()):
            place = skeleton.places.get(id(child)) if child is not None else None
            if place is None:
                continue
            try:
                live = owner.get_submodule(place)
            except AttributeError:
                continue
            parent._modules[name] = new_of.get(id(live), live)


def _set_training(
    new: nn.Module, path: str, old: nn.Module | None, old_parts: dict[str, nn.Module]
) -> None:
    if old is None:
        parent = path
        while parent not in old_parts:
            parent = parent.rpartition(".")[0]
        old = old_parts[parent]
    new.training = old.training


def _share_configs(new: nn.Module, old: nn.Module | None, skeleton: Skeleton | None) -> None:
    """Give the new module the live config, so that later changes to it are seen."""
    for name, value in list(vars(new).items()):
        if not (hasattr(value, "to_dict") and hasattr(value, "model_type")):
            continue
        there = vars(old).get(name) if old is not None else None
        if type(there) is type(value):
            vars(new)[name] = there
        elif skeleton is not None and id(value) in skeleton.configs:
            vars(new)[name] = skeleton.configs[id(value)]


def _carry_hooks(old: nn.Module, new: nn.Module) -> list[str]:
    left = []
    for name in _CALL_HOOKS + _STATE_HOOKS:
        there, own = vars(old).get(name), vars(new).get(name)
        if there is None or own is None:
            continue
        if not own or own is there:
            vars(new)[name] = _hooks_for(there, new) if there else there
        elif there and name in _CALL_HOOKS:
            vars(new)[name] = OrderedDict([*own.items(), *there.items()])
        elif there and len(there) > len(own):
            left.append("a state dict hook")
    if vars(old).get("_is_full_backward_hook") is not None:
        vars(new)["_is_full_backward_hook"] = vars(old)["_is_full_backward_hook"]
    if HOOK in vars(old):
        if not carry_accelerate(old, new):
            left.append("accelerate's hook")
    elif "forward" in vars(old):
        left.append("a forward function set on the instance")
    if vars(old).get("_compiled_call_impl") is not None:
        left.append("the compiled call")
    if "_is_hf_initialized" in vars(old):
        vars(new)["_is_hf_initialized"] = vars(old)["_is_hf_initialized"]
    return left


def _hooks_for(hooks: Any, new: nn.Module) -> Any:
    """Return the dict of hooks, or one that hands on the new module where hooks are bound to it.

    A hook before `load_state_dict` is stored with the module it was registered on (torch 2.13.0,
    `_WrappedHook`).
    """
    if not any(getattr(hook, "with_module", False) for hook in hooks.values()):
        return hooks
    return OrderedDict(
        (number, type(hook)(hook.hook, new) if getattr(hook, "with_module", False) else hook)
        for number, hook in hooks.items()
    )


def _carry_checkpointing(old: nn.Module, new: nn.Module) -> None:
    if hasattr(old, "gradient_checkpointing") and hasattr(new, "gradient_checkpointing"):
        vars(new)["gradient_checkpointing"] = old.gradient_checkpointing
        if "_gradient_checkpointing_func" in vars(old):
            vars(new)["_gradient_checkpointing_func"] = vars(old)["_gradient_checkpointing_func"]


def _own_hooks(old: nn.Module) -> list[str]:
    found = []
    if any(vars(old).get(name) for name in _CALL_HOOKS):
        found.append("a hook")
    if HOOK in vars(old):
        found.append("accelerate's hook")
    if vars(old).get("_compiled_call_impl") is not None:
        found.append("the compiled call")
    return found


def _named(built: Built, path: str) -> str:
    return joined(built.site.fqn, path) or "the root"
