"""Interop: routes as other engines hand them over, and back.

Every engine returns a different array (vLLM, SGLang, verl; integers of 8 to 32 bits, with or
without the dense layers, the last token, the cached prompt). All of them come down to `(num_tokens,
layers, top_k)`, and the model says which layers these are. What does not fit is refused, not
guessed.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from patchlab.errors import RoutingError
from patchlab.routing.fit import check_routes, routers_of
from patchlab.routing.join import model_type, num_layers
from patchlab.routing.sites import RouterSite, find_routers
from patchlab.routing.trace import LIVE, Routes, RoutingTrace, TokenBlock, smallest_dtype


def trace_of_any(model: nn.Module, routes: Any) -> RoutingTrace:
    """Make a trace of a list of tensors, one for each router, or of an array as vLLM gives it.

    Raises:
        RoutingError: It is neither, or no trace can be made of it.
    """
    if isinstance(routes, torch.Tensor | np.ndarray):
        return trace_of_arrays(model, routes)
    if isinstance(routes, Sequence) and not isinstance(routes, str | bytes):
        return trace_of_list(model, routes)
    if isinstance(routes, str | os.PathLike):
        raise RoutingError(
            f"routes are a path, {os.fspath(routes)!r}; expected a RoutingTrace. Read it with "
            f"RoutingTrace.load({os.fspath(routes)!r})."
        )
    raise RoutingError(
        f"routes are of type {type(routes).__name__}; expected a RoutingTrace, a list of tensors "
        f"(num_tokens, top_k), one for each router, or an array (num_tokens, layers, top_k)."
    )


def trace_of_list(model: nn.Module, tensors: Iterable[Any]) -> RoutingTrace:
    """Make a trace of one `(num_tokens, top_k)` tensor for each router, in layer order.

    How many sequences the tokens are is not known; the forward that replays them tells.

    Raises:
        RoutingError: Another number of tensors than of routers, or routes no router could choose.
    """
    sites = find_routers(model)
    if not isinstance(tensors, Iterable):
        raise RoutingError(
            f"routes are of type {type(tensors).__name__}, expected a list of tensors "
            f"(num_tokens, top_k), one for each router."
        )
    parts = [_integers(tensor, f"tensor {number}") for number, tensor in enumerate(tensors)]
    if len(parts) != len(sites):
        raise RoutingError(
            f"{len(parts)} tensors for {len(sites)} routers ({sites[0].fqn} … {sites[-1].fqn}). "
            f"Layers without a router get none."
        )
    for part, site in zip(parts, sites, strict=True):
        if part.dim() != 2:
            raise RoutingError(
                f"{site.fqn}: routes of shape {tuple(part.shape)}, expected (num_tokens, "
                f"{site.top_k})."
            )
    owners = dict.fromkeys(site.owner for site in sites)
    blocks = {}
    for owner in owners:
        rows = {len(part) for part, site in zip(parts, sites, strict=True) if site.owner == owner}
        if len(rows) > 1:
            raise RoutingError(
                f"the routers of {owner or 'the model'} have routes for {sorted(rows)} tokens; all "
                f"of them see the same tokens."
            )
        blocks[owner or "model"] = (TokenBlock(1, rows.pop(), is_flat=True),)
    indices = {site.fqn: part for part, site in zip(parts, sites, strict=True)}
    return _trace(model, sites, indices, blocks)


def trace_of_arrays(model: nn.Module, array: Any, *, prompt: Any = None) -> RoutingTrace:
    """Make a trace of `(num_tokens, layers, top_k)`, as vLLM returns for one request.

    Args:
        model: The model that will replay it; it says which layers have a router.
        array: Array or tensor of any integer type, or a list of them, one for each request. Layers
            are all of the model, or those with a router. Entries below 0 are routed live.
        prompt: The part for the prompt where the engine returns it apart
            (`prompt_routed_experts`); a list if `array` is one.

    Raises:
        RoutingError: The shape is not that of this model, or no router could choose so. Tokens with
            zeros only are refused: an engine leaves them where it has no routes.
    """
    requests = list(array) if isinstance(array, list | tuple) else [array]
    prompts = list(prompt) if isinstance(prompt, list | tuple) else [prompt] * len(requests)
    if len(prompts) != len(requests):
        raise RoutingError(
            f"{len(prompts)} prompt arrays for {len(requests)} requests. Give one for each "
            f"request, None for one whose array has its prompt."
        )
    if not requests:
        raise RoutingError("an empty list of arrays: there is no request whose routes to take.")
    sites = _one_per_layer(find_routers(model))
    pieces, blocks = [], []
    for number, (completion, start) in enumerate(zip(requests, prompts, strict=True)):
        parts = [completion] if start is None else [start, completion]
        layers = [
            _routed_layers(model, sites, _integers(part, f"request {number}")) for part in parts
        ]
        joined = torch.cat(layers)
        pieces.append(joined)
        blocks.append(TokenBlock(1, len(joined), is_flat=len(requests) == 1))
    experts = torch.cat(pieces)
    indices = {site.fqn: experts[:, place] for place, site in enumerate(sites)}
    return _trace(model, sites, indices, {sites[0].owner or "model": tuple(blocks)})


def trace_of_sglang(model: nn.Module, data: Any) -> RoutingTrace:
    """Make a trace of SGLang's `routed_experts`: base64 of int32 `(tokens, layers, top_k)`.

    Args:
        model: The model that will replay it.
        data: The text or bytes, or a list of them, one for each request.

    Raises:
        RoutingError: It is no base64 of int32, or its length fits neither all layers of the model
            nor those with a router, or fits both.
    """
    requests = list(data) if isinstance(data, list | tuple) else [data]
    return trace_of_arrays(model, [_decoded(model, request) for request in requests])


def _decoded(model: nn.Module, data: Any) -> torch.Tensor:
    try:
        raw = base64.b64decode(data, validate=True)
        flat = np.frombuffer(raw, dtype="<i4")
    except (TypeError, ValueError, binascii.Error) as error:
        raise RoutingError(
            f"routes are no base64 of 32-bit integers: {error}. SGLang returns them as text in "
            f"meta_info['routed_experts']."
        ) from error
    sites = _one_per_layer(find_routers(model))
    top_k = sites[0].top_k
    widths = dict.fromkeys((num_layers(model, sites), len(sites)))
    fitting = [width for width in widths if width and flat.size % (width * top_k) == 0]
    good = []
    for width in fitting:
        array = torch.from_numpy(flat.reshape(-1, width, top_k).copy())
        try:
            check_routes(_routes(model, sites, array))
        except RoutingError:
            continue
        good.append(array)
    if len(good) != 1:
        what = "neither" if not good else "both"
        raise RoutingError(
            f"{flat.size} integers fit {what} of {' and '.join(map(str, widths))} layers with "
            f"{top_k} experts for each token. Decode and reshape them, and use from_vllm."
        )
    return good[0]


def _routes(model: nn.Module, sites: Sequence[RouterSite], array: torch.Tensor) -> Routes:
    experts = _routed_layers(model, sites, array)
    indices = {site.fqn: experts[:, place] for place, site in enumerate(sites)}
    return Routes(routers_of(sites, "model"), indices, {})


def trace_of_batch(model: nn.Module, array: Any, attention_mask: Any = None) -> RoutingTrace:
    """Make a trace of `(batch, length, layers, top_k)`, as verl keeps it beside the token ids.

    Args:
        model: The model that will replay it.
        array: Array or tensor of any integer type.
        attention_mask: `(batch, length)`, 0 on padding, whose entries are then not looked at.

    Raises:
        RoutingError: The shape is not that of this model or of the mask, or no router could choose
            so.
    """
    experts = _integers(array, "routes")
    if experts.dim() != 4:
        raise RoutingError(
            f"routes of shape {tuple(experts.shape)}, expected (batch, length, layers, top_k)."
        )
    sites = _one_per_layer(find_routers(model))
    batch_size, length = experts.shape[:2]
    layers = _routed_layers(model, sites, experts.flatten(0, 1))
    real = None
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask).to(torch.bool).cpu()
        if tuple(mask.shape) != (batch_size, length):
            raise RoutingError(
                f"attention_mask of shape {tuple(mask.shape)} for routes of {batch_size} × "
                f"{length} tokens. Give the mask of the batch that the routes are of, or None if "
                f"nothing is padded."
            )
        layers = layers.masked_fill(~mask.reshape(-1, 1, 1), LIVE)
        real = None if bool(mask.all()) else mask
    indices = {site.fqn: layers[:, place] for place, site in enumerate(sites)}
    blocks = {sites[0].owner or "model": (TokenBlock(batch_size, length, real=real),)}
    return _trace(model, sites, indices, blocks)


# --- and back -------------------------------------------------------------------------------------


def array_of_trace(trace: RoutingTrace, *, dense: bool) -> np.ndarray[Any, Any]:
    """Return the one sequence of a trace as `(num_tokens, layers, top_k)`; see `to_vllm`.

    Raises:
        RoutingError: The trace has no or several sequences, or its routers do not make one array;
            or `dense` is asked for and a token has no route.
    """
    experts = _stacked(trace, "one sequence is one array; take each with trace.sequence(number)")
    if not dense:
        return experts.to(torch.int16).numpy()
    if bool((experts < 0).any()):
        raise RoutingError(
            "some tokens have no route, and the form with dense layers has no way to say so: a 0 "
            "is expert 0. Use dense=False, which says -1."
        )
    layers = [router.layer for router in trace.routers]
    number = max(trace.num_layers, max(layers) + 1)
    wide = np.zeros(
        (len(experts), number, trace.top_k),
        dtype=np.uint8 if trace.num_experts <= 1 << 8 else np.uint16,
    )
    wide[:, layers] = experts.numpy()
    return wide


def sglang_of_trace(trace: RoutingTrace) -> str:
    """Return the one sequence of a trace as base64 of int32, dense layers as zeros.

    Raises:
        RoutingError: As `array_of_trace` with dense layers.
    """
    return base64.b64encode(array_of_trace(trace, dense=True).astype("<i4").tobytes()).decode()


def batch_of_trace(trace: RoutingTrace) -> torch.Tensor:
    """Return a trace as int16 `(batch, length, layers with a router, top_k)`, -1 on padding.

    Sequences shorter than the longest are padded on the right.

    Raises:
        RoutingError: The trace has no sequences, or its routers do not make one array.
    """
    experts = _stacked(trace, None).to(torch.int16)
    blocks = trace.blocks[trace.routers[0].tokens]
    if not blocks:
        raise RoutingError("the trace has no sequences: no forward ran while it was recorded.")
    length = max(block.length for block in blocks)
    parts, row = [], 0
    for block in blocks:
        rows = experts[row : row + block.num_tokens]
        part = rows.reshape(block.batch_size, block.length, *rows.shape[1:])
        wide = part.new_full((block.batch_size, length, *rows.shape[1:]), LIVE)
        wide[:, : block.length] = part
        parts.append(wide)
        row += block.num_tokens
    return torch.cat(parts)


def _stacked(trace: RoutingTrace, one_sequence: str | None) -> torch.Tensor:
    """Return `(num_tokens, routers, top_k)`, if the trace is one array."""
    routers = trace.routers
    layers = [router.layer for router in routers]
    if len(set(layers)) < len(layers) or len({router.tokens for router in routers}) > 1:
        raise RoutingError(
            "some layers have several routers, or routers saw different tokens, so there is no one "
            "array (num_tokens, layers, top_k). Use trace.indices, router by router."
        )
    if len({router.top_k for router in routers}) > 1:
        raise RoutingError("routers choose different numbers of experts; use trace.indices.")
    if one_sequence is not None and trace.num_sequences != 1:
        raise RoutingError(f"the trace has {trace.num_sequences} sequences; {one_sequence}.")
    indices = trace.indices
    return torch.stack([indices[router.fqn] for router in routers], dim=1)


# --- shapes and types ----------------------------------------------------------------------------


def _integers(values: Any, what: str) -> torch.Tensor:
    # torch has uint16 but next to no operations for it; everything is widened once, here.
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu":
            raise RoutingError(f"{what} holds {values.dtype}, expected integers.")
        # Of uint64 the highest half becomes negative, and is refused like any other that is large.
        wide = torch.from_numpy(values.astype(np.int64 if values.itemsize > 2 else np.int32))
    elif isinstance(values, torch.Tensor):
        if values.device.type == "meta" or values.layout is not torch.strided:
            kind = "meta" if values.device.type == "meta" else str(values.layout)
            raise RoutingError(
                f"{what} is a tensor of the kind {kind}, which holds no routes that can be read. "
                f"Give a dense one with its values."
            )
        if values.is_floating_point() or values.is_complex() or values.dtype is torch.bool:
            raise RoutingError(f"{what} holds {values.dtype}, expected integers.")
        values = values.detach().cpu()
        wide = values.to(torch.int64 if values.itemsize > 2 else torch.int32)
    else:
        raise RoutingError(f"{what} is a {type(values).__name__}, expected an array or a tensor.")
    return _narrowed(wide, what)


def _narrowed(wide: torch.Tensor, what: str) -> torch.Tensor:
    # Looked at first: 2³² would become expert 0.
    if wide.dtype is torch.int64 and wide.numel():
        least, largest = (int(bound) for bound in wide.aminmax())
        limits = torch.iinfo(torch.int32)
        if least < limits.min or largest > limits.max:
            raise RoutingError(
                f"{what} holds {least if least < limits.min else largest}, which is no expert. Its "
                f"bytes are probably of another integer type."
            )
    return wide.to(torch.int32)


def _one_per_layer(sites: Sequence[RouterSite]) -> tuple[RouterSite, ...]:
    layers = [site.layer for site in sites]
    if len(set(layers)) < len(layers) or len({site.owner for site in sites}) > 1:
        raise RoutingError(
            f"this model has several routers in a layer, or in several towers ({sites[0].fqn}, "
            f"{sites[1].fqn}); one array (num_tokens, layers, top_k) cannot hold its routes. Use "
            f"RoutingTrace.from_list, one tensor for each router."
        )
    return tuple(sites)


def _routed_layers(
    model: nn.Module, sites: Sequence[RouterSite], array: torch.Tensor
) -> torch.Tensor:
    """Return the layers with a router, `(num_tokens, routers, top_k)`."""
    top_k, every = sites[0].top_k, num_layers(model, sites)
    if array.dim() != 3 or array.shape[2] != top_k or array.shape[1] not in (every, len(sites)):
        layers = f"{len(sites)}" if every in (0, len(sites)) else f"{every} or {len(sites)}"
        raise RoutingError(
            f"routes of shape {tuple(array.shape)}, expected (num_tokens, {layers}, {top_k}): "
            f"tokens, layers (all of them, or those with a router), experts of each token."
        )
    if array.shape[1] == len(sites):
        return array
    return array[:, [site.layer for site in sites]]


def _trace(
    model: nn.Module,
    sites: Sequence[RouterSite],
    indices: dict[str, torch.Tensor],
    blocks: Mapping[str, tuple[TokenBlock, ...]],
) -> RoutingTrace:
    routers = tuple(
        router for site in sites for router in routers_of([site], site.owner or "model")
    )
    routes = Routes(routers, indices, blocks, model_type(model), num_layers(model, sites))
    check_routes(routes)
    has_live = any(bool((index < 0).any()) for index in indices.values())
    dtype = smallest_dtype(max(site.num_experts for site in sites), has_live=has_live)
    small = {fqn: index.clamp(min=LIVE).to(dtype) for fqn, index in indices.items()}
    return RoutingTrace(Routes(routers, small, blocks, routes.model_type, routes.num_layers))
