"""What becomes of an old module's tensors while another is in its place, when the model is moved.

`model.to(...)`, `.half()` and the like reach what hangs in the model. A parameter that both modules
hold changes in place, and so does every update. A buffer is exchanged for another, and what only
the old module holds (dropped, or made into something else by a conversion) is not reached at all.
When the swap is undone both follow, so that the model is of one dtype and on one device again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab.apply.swap_build import Built
from patchlab.apply.tensor_names import parts_of

_State = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module holds a tensor: in its `_parameters` or its `_buffers`, by name.

    The tensor itself is not kept: one that was exchanged for another should be free to go.
    """

    held: dict[str, Any]
    name: str
    is_parameter: bool
    number: int
    shape: torch.Size
    state: _State

    @property
    def now(self) -> torch.Tensor | None:
        found: torch.Tensor | None = self.held.get(self.name)
        return found


@dataclass(frozen=True, slots=True)
class _Pair:
    """The old and the new tensors of one site.

    Attributes:
        partners: Each tensor that only an old module holds, with where the new one holds it too.
        news: The tensors of the new module.
        asks_all: Whether the new module has nothing that tells where some of the old ones go.
    """

    partners: list[tuple[_Place, _Place | None]]
    news: list[_Place]
    asks_all: bool


def follower(model: nn.Module, built: list[Built]) -> Callable[[], None]:
    """Return a function that lets the old tensors of a swap follow those in the model.

    It may be called again, and does nothing where nothing was moved.

    Args:
        model: The model that the swap is in.
        built: The new modules with their tensors, before they are hung in.
    """
    new_parts = [item.new_parts for item in built]
    inside = {id(part) for parts in new_parts for part in parts.values()}
    gone = {id(part) for item in built for part in item.old_parts.values()} - inside
    pairs: list[_Pair] = []
    alone: dict[int, _Place] = {}
    for item, parts in zip(built, new_parts, strict=True):
        olds = [
            place for part in item.old_parts.values() if id(part) in gone for place in _at(part)
        ]
        if not olds:
            continue
        news = [place for part in parts.values() for place in _at(part)]
        by_tensor = {place.number: place for place in news}
        partners = [(old, by_tensor.get(old.number)) for old in olds]
        dropped = [old for old, partner in partners if partner is None]
        alone.update((old.number, old) for old in dropped)
        asks_all = not {old.state[0] for old in dropped} <= {place.state[0] for place in news}
        pairs.append(_Pair(partners, news, asks_all))
    everywhere: list[_Place] = []
    ties: list[_Place] = []
    if alone:
        staying = [part for part in parts_of(model).values() if id(part) not in gone]
        ties = [
            place
            for part in staying
            if any(id(own) in alone for own in part._parameters.values())
            for place in _at(part)
            if place.number in alone
        ]
        if any(pair.asks_all for pair in pairs):
            # As where nothing with tensors is in its place: then all of the model tells.
            in_model = {id(part): part for parts in new_parts for part in parts.values()}
            in_model.update((id(part), part) for part in staying)
            everywhere = [place for part in in_model.values() for place in _at(part)]

    def follow() -> None:
        by_all = _moves(everywhere)
        for pair in pairs:
            moved = by_all if pair.asks_all else _moves(pair.news)
            for old, partner in pair.partners:
                if old.now is not None and not _taken_over(old, partner):
                    _move(old, moved(old.state))
        if ties:
            _tie_again(ties, alone, [place for pair in pairs for place in pair.news])

    return follow


def _tie_again(ties: list[_Place], alone: dict[int, _Place], news: list[_Place]) -> None:
    """Tie what was tied to an old tensor, and is to one of the swap's, by `tie_weights` since."""
    in_new = {id(tensor) for place in news if (tensor := place.now) is not None}
    for place in ties:
        old = alone[place.number]
        if old.now is not None and place.now is not old.now and id(place.now) in in_new:
            place.held[place.name] = old.now


def _at(part: nn.Module) -> list[_Place]:
    return [
        _Place(held, name, held is part._parameters, id(tensor), tensor.shape, _state(tensor))
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


def _state(tensor: torch.Tensor) -> _State:
    return tensor.dtype, tensor.device


def _taken_over(old: _Place, partner: _Place | None) -> bool:
    """Let a tensor that both modules held be the one that the new module has by now."""
    now = partner.now if partner is not None else None
    if partner is None or now is None or partner.is_parameter is not old.is_parameter:
        return False
    if now.shape != old.shape or (now.device.type == "meta" and old.state[1].type != "meta"):
        return False
    if type(now) is not type(old.now) or now.is_floating_point() != old.state[0].is_floating_point:
        return False  # A quantized weight, which the new module alone can use.
    if now is not old.now:
        old.held[old.name] = now
    return True


def _moves(news: list[_Place]) -> Callable[[_State], _State]:
    """Return a function from the dtype and device that a tensor had to those it is to have.

    They are those that all of the tensors got that had the same, and are left where these do not
    agree: then it was not the whole that was moved.
    """
    dtypes: dict[torch.dtype, set[torch.dtype]] = {}
    devices: dict[torch.device, set[torch.device]] = {}
    for place in news:
        now, (dtype, device) = place.now, place.state
        if now is not None:
            dtypes.setdefault(dtype, set()).add(now.dtype)
            devices.setdefault(device, set()).add(now.device)

    def moved(state: _State) -> _State:
        dtype, device = state
        of_dtype, of_device = dtypes.get(dtype, set()), devices.get(device, set())
        return (
            next(iter(of_dtype)) if len(of_dtype) == 1 else dtype,
            next(iter(of_device)) if len(of_device) == 1 else device,
        )

    return moved


def _move(old: _Place, state: _State) -> None:
    tensor = old.held[old.name]
    if _state(tensor) == state or "meta" in (tensor.device.type, state[1].type):
        return
    dtype, device = state
    if not old.is_parameter:
        old.held[old.name] = tensor.to(device=device, dtype=dtype)
        return
    # The same object, as `nn.Module.to` leaves it: optimizers and ties know it.
    with torch.no_grad():
        tensor.data = tensor.data.to(device=device, dtype=dtype)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(device=device, dtype=dtype)
