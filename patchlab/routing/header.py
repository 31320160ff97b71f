"""Header: what a trace file says of itself, checked before anything is made of it.

A file may come from anywhere. Numbers that are too large would be asked of the memory later, and
wrong types would fail somewhere far from the file; so both are refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from patchlab.routing.fit import check_routes
from patchlab.routing.trace import LIVE, Router, Routes, TokenBlock

# Far above any model: DeepSeek-V3 has 256 experts and 61 layers, product keys 2¹⁶ experts.
_MOST_EXPERTS, _MOST_LAYERS, _MOST_TOKENS = 1 << 20, 10_000, 1 << 40
_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def routes_of(header: Any, tensors: Mapping[str, torch.Tensor]) -> Routes:
    """Make routes of the header and the tensors of a file.

    Raises:
        ValueError: They do not go together, or no trace can be so.
        RoutingError: No router could choose so.
    """
    _check(isinstance(header, dict), "the header is no object")
    routers = tuple(_router(router) for router in _list(header, "routers"))
    _check(bool(routers), "there is no router")
    _check(len({router.fqn for router in routers}) == len(routers), "a router is there twice")
    groups = header.get("blocks")
    _check(isinstance(groups, dict), "blocks are no object")
    blocks = {
        str(key): tuple(_block(block, tensors) for block in _list(groups, key)) for key in groups
    }
    _check({router.tokens for router in routers} <= set(blocks), "a router's tokens are missing")
    indices = {router.fqn: _index(router, blocks[router.tokens], tensors) for router in routers}
    routes = Routes(
        routers,
        indices,
        blocks,
        _text(header, "model_type"),
        _number(header, "num_layers", 0, _MOST_LAYERS),
    )
    check_routes(routes)
    return routes


def _router(router: Any) -> Router:
    _check(isinstance(router, dict), "a router is no object")
    num_experts = _number(router, "num_experts", 1, _MOST_EXPERTS)
    num_groups = _number(router, "num_groups", 1, num_experts)
    return Router(
        fqn=_text(router, "fqn"),
        layer=_number(router, "layer", -1, _MOST_LAYERS),
        num_experts=num_experts,
        top_k=_number(router, "top_k", 1, num_experts),
        tokens=_text(router, "tokens"),
        repeats=_flag(router, "repeats"),
        num_groups=num_groups,
        top_k_groups=_number(router, "top_k_groups", 1, num_groups),
    )


def _block(block: Any, tensors: Mapping[str, torch.Tensor]) -> TokenBlock:
    _check(isinstance(block, dict), "a block is no object")
    shape = _number(block, "batch_size", 0, _MOST_TOKENS), _number(block, "length", 0, _MOST_TOKENS)
    real = None
    if block.get("real") is not None:
        name = _text(block, "real")
        _check(name in tensors, f"{name} is missing")
        real = tensors[name].to(torch.bool)
        _check(tuple(real.shape) == shape, f"{name} is {tuple(real.shape)}, expected {shape}")
    prompt = block.get("prompt")
    return TokenBlock(
        *shape,
        real=real,
        prompt=None if prompt is None else _number(block, "prompt", 0, shape[1]),
        is_flat=_flag(block, "is_flat"),
    )


def _index(
    router: Router, blocks: tuple[TokenBlock, ...], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    index = tensors.get(f"experts.{router.fqn}")
    if index is None:
        raise ValueError(f"experts.{router.fqn} is missing")
    shape = sum(block.num_tokens for block in blocks), router.top_k
    _check(
        index.dtype in _TYPES and tuple(index.shape) == shape,
        f"experts.{router.fqn} is {tuple(index.shape)} of {index.dtype}, the header says {shape} "
        f"integers",
    )
    least = int(index.min()) if index.numel() else 0
    _check(least >= LIVE, f"{router.fqn} has expert {least}")
    return index


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _list(holder: Mapping[str, Any], name: str) -> list[Any]:
    value = holder.get(name)
    _check(isinstance(value, list), f"{name} is no list")
    found: list[Any] = value or []
    return found


def _text(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    _check(isinstance(value, str), f"{name} is {value!r:.40}, expected text")
    return str(value)


def _flag(holder: Mapping[str, Any], name: str) -> bool:
    value = holder.get(name)
    _check(isinstance(value, bool), f"{name} is {value!r:.40}, expected true or false")
    return bool(value)


def _number(holder: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = holder.get(name)
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    _check(fits, f"{name} is {value!r:.40}, expected a whole number from {least} to {most}")
    return int(value or 0)
