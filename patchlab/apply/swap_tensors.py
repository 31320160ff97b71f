"""The tensors of a swap: shared where they agree, converted where they do not, else constructed.

For each tensor of a new module, in this order:

1. weight conversions, where those of the replacement differ from those that made the module there:
   the tensors go back to the layout of the checkpoint and forward to the new one;
2. the very tensor (the same `Parameter` object) of the same name and shape in the old module, so
   optimizers, ties and `requires_grad` stay as they are and no byte is copied;
3. what the constructor gives on the CPU: constants that no checkpoint has, and new parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patchlab._upstream import revert_conversions, saved_transforms
from patchlab.apply.swap_build import Built, construct, saved_tensors, tensors_at
from patchlab.apply.swap_sites import Site
from patchlab.apply.transforms import Carried, Made, carry_forward, signature
from patchlab.errors import SwapError
from patchlab.mapping.rules import PatchMapping


@dataclass(eq=False, slots=True)
class Filled:
    """What became of the tensors of one new module; names are relative to it.

    Attributes:
        shared: Names that hold the very tensor of the old module.
        converted: Names that a conversion made.
        constructed: Parameters and persistent buffers that only the constructor gave.
        constants: Other tensors that the constructor gave.
        dropped: Parameters and persistent buffers of the old module that nothing holds or was made
            from.
    """

    shared: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    constructed: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    copied_bytes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Converted:
    """What conversions made for the sites of one owner.

    Attributes:
        made: Key in the owner → tensor.
        used: Ids of the old tensors that something was made from.
        unplaced: Keys of the checkpoint layout that came to no new module.
        transforms: What `_weight_conversions` is to be from now on, None to leave it.
    """

    made: dict[str, Made]
    used: frozenset[int]
    unplaced: tuple[str, ...] = ()
    transforms: list[Any] | None = None


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
    if not old_transforms and not new_transforms:
        return NOTHING
    state: dict[str, torch.Tensor] = {}
    target: dict[str, torch.Tensor] = {}
    for item in built:
        place = item.site.owned_fqn if owner is not None else item.site.fqn
        for name, tensor in saved_tensors(item.site.module).items():
            state[_join(place, name)] = tensor
        for name, tensor in saved_tensors(item.module).items():
            target[_join(place, name)] = tensor
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
    )


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


def fill(built: Built, converted: Converted, place: str, mapping: PatchMapping) -> Filled:
    """Give the new module of a site its tensors; the old module is not changed.

    Raises:
        SwapError: A tensor of the same name has another shape, or is on the meta device.
    """
    site, new = built.site, built.module
    old = _tensors_of(site.module)
    storages = {tensor.untyped_storage().data_ptr() for tensor in old.values()}
    filled = Filled()
    classes: set[type[nn.Module]] = {site.original}
    grads = [p.requires_grad for p in site.module.parameters()]
    requires_grad = any(grads) if grads else True
    waiting: list[tuple[nn.Module, str, str]] = []
    for prefix, module in list(new.named_modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            full = _join(prefix, name)
            made = converted.made.get(_join(place, full))
            if made is not None:
                module._parameters[name] = _converted(
                    made.tensor, parameter, full, site, requires_grad
                )
                is_same = isinstance(made.tensor, nn.Parameter)
                (filled.shared if is_same else filled.converted).append(full)
                # A tensor that was only split up is a view of the old one.
                if made.tensor.untyped_storage().data_ptr() not in storages:
                    filled.copied_bytes += made.tensor.nbytes
            elif (there := old.get(full)) is not None and isinstance(there, nn.Parameter):
                _check_shape(there, parameter, full, site)
                module._parameters[name] = there
                filled.shared.append(full)
            else:
                waiting.append((module, prefix, name))
                filled.constructed.append(full)
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            full = _join(prefix, name)
            persistent = name not in module._non_persistent_buffers_set
            made = converted.made.get(_join(place, full))
            there = old.get(full)
            if made is not None:
                module._buffers[name] = made.tensor
                filled.converted.append(full)
            elif (
                there is not None
                and not isinstance(there, nn.Parameter)
                and (persistent or _same_class(module, site.module, prefix))
                and there.device.type != "meta"
            ):
                _check_shape(there, buffer, full, site)
                module._buffers[name] = there
                filled.shared.append(full)
            else:
                waiting.append((module, prefix, name))
                (filled.constructed if persistent else filled.constants).append(full)
    plain = [
        (module, prefix, name)
        for prefix, module in new.named_modules()
        for name, value in vars(module).items()
        if _holds_meta(value)
    ]
    if waiting or plain:
        assert built.recipe is not None, "a finished module has nothing on the meta device"
        fresh = any(name in module._parameters for module, _, name in waiting)
        device, dtype = _device_and_dtype(site)
        with _default_dtype(dtype):
            cpu = construct(built.recipe, mapping, classes, torch.device("cpu"), random_init=fresh)
        for module, prefix, name in waiting:
            _take(module, name, cpu.get_submodule(prefix), device, requires_grad)
            _prefer_old(module, name, old.get(_join(prefix, name)))
        for module, prefix, name in plain:
            vars(module)[name] = _moved(vars(cpu.get_submodule(prefix))[name], device)
            filled.constants.append(_join(prefix, name))
    held = {id(tensor) for tensor in _tensors_of(new).values()}
    filled.dropped = [
        name
        for name, tensor in saved_tensors(site.module).items()
        if id(tensor) not in held and id(tensor) not in converted.used
    ]
    return filled


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer at every path, non-persistent buffers too."""
    return dict(tensors_at(module))


def _converted(
    tensor: torch.Tensor, wanted: torch.Tensor, name: str, site: Site, requires_grad: bool
) -> nn.Parameter:
    _check_shape(tensor, wanted, name, site)
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=requires_grad and tensor.is_floating_point())


def _check_shape(there: torch.Tensor, wanted: torch.Tensor, name: str, site: Site) -> None:
    if there.device.type == "meta":
        raise SwapError(
            f"{_join(site.fqn, name)} is on the meta device: its weights are not loaded, or are "
            f"offloaded by accelerate. Load the model whole, then swap."
        )
    if there.shape != wanted.shape:
        raise SwapError(
            f"{_join(site.fqn, name)} has shape {tuple(there.shape)} and "
            f"{site.rule.replacement.__qualname__} wants {tuple(wanted.shape)}. Give a weight "
            f"conversion (conversions=...), or another name to a parameter that is new."
        )


def _same_class(module: nn.Module, old_root: nn.Module, prefix: str) -> bool:
    try:
        return type(old_root.get_submodule(prefix)) is type(module)
    except AttributeError:
        return False


def _device_and_dtype(site: Site) -> tuple[torch.device, torch.dtype | None]:
    """Return where a module's tensors are, and the floating type that its parameters have."""
    sources = [site.module] + ([site.owner] if site.owner is not None else [])
    sources += [slot.parent for slot in site.slots]
    device, dtype = None, None
    for source in sources:
        for tensor in source.parameters():
            device = device or tensor.device
            if dtype is None and tensor.is_floating_point():
                dtype = tensor.dtype
            if device is not None and dtype is not None:
                return device, dtype
    return device or torch.device("cpu"), dtype


def _take(
    module: nn.Module, name: str, source: nn.Module, device: torch.device, requires_grad: bool
) -> None:
    if name in module._parameters:
        value = source._parameters[name]
        assert value is not None, "the same constructor made both"
        wanted = value.requires_grad and requires_grad
        module._parameters[name] = nn.Parameter(value.detach().to(device), requires_grad=wanted)
    else:
        buffer = source._buffers[name]
        module._buffers[name] = None if buffer is None else buffer.to(device)


def _prefer_old(module: nn.Module, name: str, there: torch.Tensor | None) -> None:
    """Keep the old buffer where the constructor gives the same, so that it is not held twice."""
    new = module._buffers.get(name)
    if new is None or there is None or isinstance(there, nn.Parameter):
        return
    if there.device == new.device and there.dtype == new.dtype and torch.equal(there, new):
        module._buffers[name] = there


def _holds_meta(value: Any) -> bool:
    return any(tensor.device.type == "meta" for tensor in _tensors_in(value))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    moved = [item.to(device) if isinstance(item, torch.Tensor) else item for item in value]
    return tuple(moved) if isinstance(value, tuple) else moved


class _default_dtype:
    """Construct in the model's own floating type, as `from_pretrained` does."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        self._dtype = dtype if dtype in floats else None
        self._outer = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *exc_info: object) -> None:
        torch.set_default_dtype(self._outer)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
