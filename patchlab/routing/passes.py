"""Passes: which tokens one forward of a model runs over, read from its arguments.

A router sees rows. Which sequence and which position a row is, only the call of the model around it
tells: the shape of its inputs, how much its cache holds already, which positions are padding. This
file reads that, and nothing else in the room looks at a model's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_IDS = ("input_ids", "decoder_input_ids")
_EMBEDS = ("inputs_embeds", "decoder_inputs_embeds", "hidden_states")
_CACHES = ("past_key_values", "cache")  # transformers 5.22 and 5.23; from 5.24 also `cache`


@dataclass(frozen=True, slots=True, eq=False)
class TokenPass:
    """The tokens of one forward.

    Attributes:
        batch_size: Sequences.
        length: Positions of each sequence that this forward runs, padding included.
        past: Positions that the cache held before it.
        cached: Whether a cache was handed in, so that more positions may follow.
        real: Bool tensor `(batch_size, length)`, False on padding; None where no mask says so.
        starts: For sequences packed into one row, where each begins; empty otherwise.
        ahead: The cache, where this forward may run ahead of what stays in it, as assisted decoding
            does: several tokens after cached ones. None otherwise, so that no cache is kept alive.
    """

    batch_size: int
    length: int
    past: int = 0
    cached: bool = False
    real: torch.Tensor | None = None
    starts: tuple[int, ...] = ()
    ahead: Any = None

    @property
    def num_tokens(self) -> int:
        """Rows that a router which routes all of them gets."""
        return self.batch_size * self.length

    def __str__(self) -> str:
        return f"{self.batch_size} × {self.length} tokens" + (
            f" after {self.past} cached" if self.past else ""
        )


def read_pass(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, packed: bool = False
) -> TokenPass | None:
    """Read which tokens a call of a model runs over.

    Args:
        module: The model that is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        packed: Also look for the starts of packed sequences in `position_ids`, which makes a GPU
            wait.

    Returns:
        The pass; None if no argument has the shape of tokens.
    """
    named = _named(module, args, kwargs) if args else kwargs
    shape = _shape(named)
    if shape is None:
        return None
    batch_size, length = shape
    cache = next((named[name] for name in _CACHES if named.get(name) is not None), None)
    mask = named.get("attention_mask")
    past = _past(cache, mask, length)
    real = None if mask is None else _window(mask, past, batch_size, length)
    return TokenPass(
        batch_size=batch_size,
        length=length,
        past=past,
        cached=cache is not None,
        real=real,
        ahead=cache if past and length > 1 and hasattr(cache, "get_seq_length") else None,
        starts=_starts(named.get("position_ids"), shape) if packed and mask is None else (),
    )


def _named(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    names = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    named = dict(zip(names, args, strict=False))
    if not names:  # A wrapper's forward(*args, **kwargs): the first argument is the tokens.
        first = args[0]
        if isinstance(first, torch.Tensor):
            named = {"inputs_embeds" if first.is_floating_point() else "input_ids": first}
    return {**named, **kwargs}


def _shape(named: Mapping[str, Any]) -> tuple[int, int] | None:
    for name in _IDS:
        ids = named.get(name)
        if isinstance(ids, torch.Tensor):
            return (1, ids.shape[0]) if ids.dim() == 1 else (ids.shape[0], ids.shape[1])
    for name in _EMBEDS:
        embeds = named.get(name)
        if isinstance(embeds, torch.Tensor) and embeds.dim() >= 2:
            return (1, embeds.shape[0]) if embeds.dim() == 2 else (embeds.shape[0], embeds.shape[1])
    return None


def _past(cache: Any, mask: Any, length: int) -> int:
    if cache is None:
        return 0
    if hasattr(cache, "get_seq_length"):
        try:
            return int(cache.get_seq_length())
        except ValueError:
            # A cache of linear-attention layers alone does not count. The mask then does.
            pass
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return max(int(mask.shape[1]) - length, 0)
    return 0


def _window(mask: Any, past: int, batch_size: int, length: int) -> torch.Tensor | None:
    """Return which positions of this pass are no padding, as a copy."""
    if isinstance(mask, Mapping):  # One mask for each kind of attention layer.
        masks = [part for part in mask.values() if isinstance(part, torch.Tensor)]
        mask = masks[0] if masks else None
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() == 2 and mask.shape[0] == batch_size and mask.shape[1] >= length:
        end = past + length if mask.shape[1] >= past + length else mask.shape[1]
        # A copy: a view would keep the mask of every step of a generation alive.
        return mask[:, end - length : end].to(torch.bool, copy=True)
    if mask.dim() == 4 and mask.shape[0] == batch_size and mask.shape[-2] == length:
        if mask.shape[-1] < past + length:
            return None
        # Whether a position may look at itself: with causal and sliding masks every real token may.
        itself = mask[:, 0].diagonal(offset=past, dim1=-2, dim2=-1)[:, :length]
        return itself.clone() if itself.dtype is torch.bool else itself == 0
    return None


def _starts(position_ids: Any, shape: tuple[int, int]) -> tuple[int, ...]:
    if (
        not isinstance(position_ids, torch.Tensor)
        or shape[0] != 1
        or tuple(position_ids.shape) != shape
    ):
        return ()
    starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    return tuple(starts) if len(starts) > 1 and starts[0] == 0 else ()
