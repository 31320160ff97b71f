"""Weight conversions of a swap, run on tensors that are in memory.

Where the conversions of a replacement differ from those that made the module there, the tensors go
back to the layout of the checkpoint and forward to the new one: first on the meta device, which
tells what there is to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patchlab._upstream import is_prefix_change, revert_conversions, saved_transforms
from patchlab.apply.swap_build import Built
from patchlab.apply.tensor_names import joined, saved_tensors
from patchlab.apply.transforms import Carried, Made, carry_forward, signature
from patchlab.errors import SwapError


@dataclass(frozen=True, eq=False, slots=True)
class Converted:
    """What conversions made for the sites of one owner.

    Attributes:
        made: Key in the owner → tensor.
        used: Ids of the old tensors that something was made from.
        unplaced: Keys of the checkpoint layout that came to no new module.
        transforms: What `_weight_conversions` is to be from now on, None to leave it.
        trained: Key in the owner → whether each tensor it was made from requires a gradient, as far
            as that is known.
    """

    made: dict[str, Made]
    used: frozenset[int]
    unplaced: tuple[str, ...] = ()
    transforms: list[Any] | None = None
    trained: dict[str, frozenset[bool]] = field(default_factory=dict)


NOTHING = Converted({}, frozenset())


def convert_tensors(
    owner: nn.Module | None,
    root: nn.Module,
    built: list[Built],
    new_transforms: list[Any],
) -> Converted:
    """Carry the tensors below the sites of one owner from the old layout to the new one.

    First on the meta device, which tells what there is to do; mostly nothing.

    Args:
        owner: The model of transformers, None for modules outside of any.
        root: What keys are relative to: the owner, or the whole model.
        built: The new modules.
        new_transforms: Those that a load under the patch would use.

    Raises:
        SwapError: An operation raised.
    """
    old_transforms = [] if owner is None else list(saved_transforms(owner))
    known = {signature(transform) for transform in old_transforms}
    unknown = [t for t in new_transforms if signature(t) not in known and not is_prefix_change(t)]
    if not unknown and all(item.cloned or _same_layout(item) for item in built):
        return NOTHING
    state: dict[str, torch.Tensor] = {}
    target: dict[str, torch.Tensor] = {}
    for item in built:
        place = item.site.owned_fqn if owner is not None else item.site.fqn
        for name, tensor in saved_tensors(item.site.module).items():
            state[joined(place, name)] = tensor
        for name, tensor in saved_tensors(item.module).items():
            target[joined(place, name)] = tensor
    metas = {name: torch.empty_like(t, device="meta") for name, t in state.items()}
    planned = carry_forward(_checkpoint(owner, metas), new_transforms, root, target)
    _raise_failure(planned)
    wanted = {
        name
        for name, item in planned.made.items()
        if not (
            item.tensor is metas.get(name)
            if item.converter is None
            else signature(item.converter) in known
            and name in metas
            and metas[name].shape == target[name].shape
        )
    }
    if not wanted:
        return NOTHING
    checkpoint = _checkpoint(owner, state)
    needed = {key for name in wanted for key in planned.made[name].sources}
    for key in sorted(needed):
        if checkpoint[key].device.type == "meta":
            raise SwapError(
                f"{key!r} would have to be converted, and is on the meta device: it is not loaded, "
                f"or offloaded by accelerate. Swap before the model is offloaded "
                f"(dispatch_model), or load it under patchlab.patched with the same mapping."
            )
    carried = carry_forward(
        {key: tensor for key, tensor in checkpoint.items() if key in needed},
        new_transforms,
        root,
        target,
    )
    _raise_failure(carried)
    made = {name: item for name, item in carried.made.items() if name in wanted}
    in_place = {id(tensor) for tensor in state.values()}
    unplaced = {key: checkpoint[key] for key in planned.unexpected}
    used = in_place - {id(tensor) for tensor in unplaced.values()}
    fresh = [t for t in new_transforms if signature(t) not in known and t.was_used()]
    return Converted(
        made,
        frozenset(used),
        tuple(key for key, tensor in unplaced.items() if id(tensor) not in in_place),
        [*old_transforms, *fresh] if owner is not None and fresh else None,
        {name: _trained(item, checkpoint, state) for name, item in made.items()},
    )


def _trained(
    made: Made, checkpoint: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> frozenset[bool]:
    """Return whether the parameters that a tensor was made from require gradients.

    What was turned back to the layout of the checkpoint is a view of a parameter, or not known.
    """
    flags = {
        tensor.untyped_storage().data_ptr(): tensor.requires_grad
        for tensor in state.values()
        if isinstance(tensor, nn.Parameter)
    }
    places = [checkpoint[key].untyped_storage().data_ptr() for key in made.sources]
    return frozenset(flags[place] for place in places if place in flags)


def _same_layout(built: Built) -> bool:
    """Tell whether a new module has the names and shapes of the old one."""
    old, new = saved_tensors(built.site.module), saved_tensors(built.module)
    return old.keys() == new.keys() and all(old[name].shape == new[name].shape for name in old)


def _checkpoint(owner: nn.Module | None, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bring an owner's tensors to the layout of its checkpoint."""
    if owner is None:
        return state
    try:
        with torch.no_grad():
            return revert_conversions(owner, dict(state))
    except Exception as error:
        raise SwapError(
            f"the tensors of the replaced modules could not be brought back to the layout of a "
            f"checkpoint: {type(error).__name__}: {error}. The conversions that the model was "
            f"loaded with do not reverse."
        ) from error


def _raise_failure(carried: Carried) -> None:
    for name, failure in carried.failed.items():
        raise SwapError(
            f"the conversion that makes {name!r} raised {type(failure).__name__}: {failure}. "
            f"Nothing was changed."
        ) from failure
