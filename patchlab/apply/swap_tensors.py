"""The tensors of a swap: shared where they agree, converted where they do not, else constructed.

For each tensor of a new module, in this order:

1. weight conversions, where those of the replacement differ from those that made the module there:
   the tensors go back to the layout of the checkpoint and forward to the new one;
2. the very tensor (the same `Parameter` object) of the same name and shape in the old module, so
   optimizers, ties and `requires_grad` stay as they are and no byte is copied;
3. what the constructor gives on the CPU: constants that no checkpoint has, and new parameters,
   which require a gradient as their class has it, also in a model that is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patchlab.apply.swap_build import Built, construct
from patchlab.apply.swap_converting import Converted
from patchlab.apply.swap_offload import supplied_names
from patchlab.apply.swap_sites import Site
from patchlab.apply.tensor_names import joined, parts_of, saved_tensors, tensors_at
from patchlab.apply.transforms import Made
from patchlab.errors import SwapError
from patchlab.mapping.rules import PatchMapping

# Attributes of a module that hold its parameters, buffers and children.
_HELD_BY_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = (list, tuple, dict)


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
        mixed: Converted parameters made from frozen and from trained ones.
        awake: Constructed parameters that require a gradient, where the old module is all frozen.
    """

    shared: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    constructed: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    awake: list[str] = field(default_factory=list)
    copied_bytes: int = 0


def already_filled(built: Built) -> Filled:
    """Say which tensors of the old module are in a new one that was made by its own factory."""
    old = {id(tensor) for tensor in built.old_tensors.values()}
    shared = [name for name, tensor in tensors_at(built.module) if id(tensor) in old]
    return Filled(shared=shared)


def fill(
    built: Built,
    converted: Converted,
    place: str,
    mapping: PatchMapping,
    live: frozenset[int] = frozenset(),
) -> Filled:
    """Give the new module of a site its tensors; the old module is not changed.

    Args:
        built: The new module.
        converted: What conversions made.
        place: The path that keys of `converted` begin with.
        mapping: The rules of the swap.
        live: Ids of modules of the model: where the new module holds one, it is left as it is.

    Raises:
        SwapError: A tensor of the same name has another shape, or is on the meta device.
    """
    site, new = built.site, built.module
    old = built.old_tensors
    supplied = supplied_names(built.old_parts)
    filled = Filled()
    if built.cloned:
        for name, tensor in old.items():
            _check_there(tensor, name, site, supplied)
        return Filled(shared=list(old))
    grads = [t.requires_grad for t in old.values() if _is_parameter(t)]
    requires_grad = any(grads) if grads else True
    waiting: list[tuple[nn.Module, str, str]] = []
    plain: list[tuple[nn.Module, str, str]] = []
    used = set(converted.used)
    # Tensor of the new module as constructed → what takes its place: one under two names stays one.
    given: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for prefix, module in parts_of(new).items():
        if id(module) in live:
            filled.shared += [joined(prefix, name) for name, _ in _own_tensors(module)]
            continue
        for name, wanted in _own_tensors(module):
            full = joined(prefix, name)
            is_parameter = name in module._parameters
            persistent = name not in module._non_persistent_buffers_set
            made = converted.made.get(joined(place, full))
            there = old.get(full)
            if there is wanted:  # put there already, since it was added to the old module by hand
                filled.shared.append(full)
            elif made is not None and is_parameter:
                trained = converted.trained.get(joined(place, full)) or {requires_grad}
                module._parameters[name] = _converted(made, wanted, full, site, any(trained))
                if len(trained) > 1:
                    filled.mixed.append(full)
                is_same = isinstance(made.tensor, nn.Parameter)
                (filled.shared if is_same else filled.converted).append(full)
                if not _is_view(made.tensor, old):
                    filled.copied_bytes += made.tensor.nbytes
            elif made is not None:
                module._buffers[name] = made.tensor
                filled.converted.append(full)
            elif there is not None and is_parameter:
                _check_shape(there, wanted, full, site, supplied)
                module._parameters[name] = parameter = _as_parameter(there, wanted)
                given[id(wanted)] = wanted, parameter
                used.add(id(there))
                filled.shared.append(full)
            elif (
                there is not None
                and (persistent or _same_class(module, site.module, prefix))
                and (there.device.type != "meta" or full in supplied)
            ):
                _check_shape(there, wanted, full, site, supplied)
                module._buffers[name] = there.detach() if _is_parameter(there) else there
                used.add(id(there))
                filled.shared.append(full)
            else:
                waiting.append((module, prefix, name))
                (filled.constructed if persistent else filled.constants).append(full)
        plain += [(module, prefix, n) for n, v in vars(module).items() if _holds_meta(n, v)]
    for module, prefix, name in list(waiting):
        found = given.get(id(module._parameters.get(name)))
        if found is not None:
            module._parameters[name] = found[1]
            waiting.remove((module, prefix, name))
            filled.constructed.remove(joined(prefix, name))
            filled.shared.append(joined(prefix, name))
    if waiting or plain:
        _construct_rest(built, mapping, waiting, plain, old)
        if not requires_grad:
            filled.awake = [
                joined(prefix, name)
                for module, prefix, name in waiting
                if (new_one := module._parameters.get(name)) is not None and new_one.requires_grad
            ]
        filled.constants += [joined(prefix, name) for _, prefix, name in plain]
    held = {id(tensor) for _, tensor in tensors_at(new)}
    filled.dropped = [
        name
        for name, tensor in saved_tensors(site.module).items()
        if id(tensor) not in held and id(tensor) not in used
    ]
    return filled


def _construct_rest(
    built: Built,
    mapping: PatchMapping,
    waiting: list[tuple[nn.Module, str, str]],
    plain: list[tuple[nn.Module, str, str]],
    old: dict[str, torch.Tensor],
) -> None:
    """Take the tensors that nothing else gives from an instance built on the CPU."""
    assert built.recipe is not None, "a finished module has nothing on the meta device"
    sizes = [dict(_own_tensors(module))[name].numel() for module, _, name in waiting]
    sizes += [t.numel() for module, _, name in plain for t in _tensors_in(vars(module)[name])]
    device, dtype = _device_and_dtype(built.site)
    with _default_dtype(dtype):
        (cpu,) = construct(
            [built.recipe],
            mapping,
            {built.site.original},
            torch.device("cpu"),
            largest=max(sizes),
        )
    taken: dict[int, nn.Parameter] = {}
    for module, prefix, name in waiting:
        _take(module, name, cpu.get_submodule(prefix), device, taken)
        _prefer_old(module, name, old.get(joined(prefix, name)))
    for module, prefix, name in plain:
        vars(module)[name] = _moved(vars(cpu.get_submodule(prefix))[name], device)


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List a module's own parameters and buffers, those of its children left out."""
    return [
        (name, tensor)
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


def _is_view(tensor: torch.Tensor, old: dict[str, torch.Tensor]) -> bool:
    """Tell whether a converted tensor was only split up or turned, and holds no copy."""
    place = tensor.untyped_storage().data_ptr()
    return any(there.untyped_storage().data_ptr() == place for there in old.values())


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _as_parameter(there: torch.Tensor, wanted: torch.Tensor) -> nn.Parameter:
    """Return the very parameter; of what was a buffer, one that shares its storage."""
    if isinstance(there, nn.Parameter):
        return there
    wants_grad = wanted.requires_grad and there.is_floating_point()
    return nn.Parameter(there, requires_grad=wants_grad)


def _converted(
    made: Made, wanted: torch.Tensor, name: str, site: Site, requires_grad: bool
) -> nn.Parameter:
    tensor = made.tensor
    _check_there(tensor, name, site, frozenset())
    if tensor.shape != wanted.shape:
        raise SwapError(
            f"{joined(site.fqn, name)} is converted from {', '.join(made.sources)}, which gives "
            f"the shape {tuple(tensor.shape)}, and {site.rule.replacement.__qualname__} wants "
            f"{tuple(wanted.shape)}. If a weight is missing there, a module was put in its place "
            f"since the model was built, such as an adapter: merge it first. Else the conversion "
            f"and the replacement do not fit."
        )
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=requires_grad and tensor.is_floating_point())


def _check_shape(
    there: torch.Tensor,
    wanted: torch.Tensor,
    name: str,
    site: Site,
    supplied: frozenset[str] = frozenset(),
) -> None:
    _check_there(there, name, site, supplied)
    if there.shape != wanted.shape:
        raise SwapError(
            f"{joined(site.fqn, name)} has shape {tuple(there.shape)} and "
            f"{site.rule.replacement.__qualname__} wants {tuple(wanted.shape)}. Give a weight "
            f"conversion (conversions=...), or another name to a parameter that is new."
        )


def _check_there(there: torch.Tensor, name: str, site: Site, supplied: frozenset[str]) -> None:
    if there.device.type == "meta" and name not in supplied:
        raise SwapError(
            f"{joined(site.fqn, name)} is on the meta device: its weights are not loaded. Load the "
            f"model whole, then swap."
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
    module: nn.Module,
    name: str,
    source: nn.Module,
    device: torch.device,
    taken: dict[int, nn.Parameter],
) -> None:
    if name in module._parameters:
        value = source._parameters[name]
        assert value is not None, "the same constructor made both"
        if id(value) not in taken:
            # As its class has it, however the old module is: what is new is mostly to be trained.
            wanted = value.requires_grad
            taken[id(value)] = nn.Parameter(value.detach().to(device), requires_grad=wanted)
        module._parameters[name] = taken[id(value)]
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


def _holds_meta(name: str, value: Any) -> bool:
    """Tell whether an attribute of a module is, or holds, a tensor on the meta device."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "meta"
    if not isinstance(value, _CONTAINERS) or not value or name in _HELD_BY_TORCH:
        return False
    return any(tensor.device.type == "meta" for tensor in _tensors_in(value))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, _moved(item, device)) for key, item in value.items())
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if type(value) is tuple:
        return tuple(_moved(item, device) for item in value)
    return value


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
