"""Joining: from the passes of a run to whole sequences.

`generate` runs a prompt at once, or in chunks, and then token by token; assisted decoding runs
ahead and takes tokens back. Each pass says how many positions were cached before it, and that alone
tells what it continues: as many as there are, append; fewer, the rest was taken back; none, a new
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab.routing.passes import TokenPass
from patchlab.routing.sites import RouterSite
from patchlab.routing.trace import LIVE, Router, Routes, TokenBlock, smallest_dtype


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPass:
    """The choices of one pass.

    Attributes:
        owner: FQN of the model that ran.
        tokens: What it ran over.
        fqns: The routers that ran once and over all tokens.
        stacked: Their experts, `(len(fqns), num_tokens, top_k)`.
        others: Those of the other routers, one tensor for each call: routers that saw some of the
            tokens only, that ran more than once, or that choose another number of experts.
    """

    owner: str
    tokens: TokenPass
    fqns: tuple[str, ...]
    stacked: torch.Tensor | None
    others: Mapping[str, tuple[torch.Tensor, ...]]

    @classmethod
    def of(
        cls,
        owner: str,
        tokens: TokenPass,
        notes: Mapping[str, Sequence[torch.Tensor]],
        dtype: torch.dtype,
    ) -> RecordedPass:
        """Make the record of a pass, small, from what was noted while it ran."""
        first = next(iter(notes.values()))[0]
        shape = torch.Size((tokens.num_tokens, first.shape[1]))
        regular = {
            fqn: calls[0].to(first.device)
            for fqn, calls in notes.items()
            if len(calls) == 1 and calls[0].shape == shape
        }
        others = {
            fqn: tuple(call.to(dtype) for call in calls)
            for fqn, calls in notes.items()
            if fqn not in regular
        }
        stacked = torch.stack(tuple(regular.values())).to(dtype) if regular else None
        return cls(owner, tokens, tuple(regular), stacked, others)

    def rows(self, site: RouterSite) -> torch.Tensor | None:
        """Return a router's experts if it ran once and over all tokens, or did not run at all."""
        if site.fqn in self.fqns and self.stacked is not None:
            return self.stacked[self.fqns.index(site.fqn)]
        calls = self.others.get(site.fqn)
        if calls is None:
            # It was passed over: no route is known.
            return torch.full((self.tokens.num_tokens, site.top_k), LIVE, dtype=torch.int32)
        return calls[0] if self.is_regular(site) else None

    def is_regular(self, site: RouterSite) -> bool:
        """Tell whether a router's rows are the tokens of the pass."""
        calls = self.others.get(site.fqn)
        return calls is None or (len(calls) == 1 and calls[0].shape[0] == self.tokens.num_tokens)


def join_passes(
    model: nn.Module, sites: Sequence[RouterSite], passes: Sequence[RecordedPass]
) -> Routes:
    """Make whole sequences of passes.

    A router that in some pass saw only some of the tokens (the text and the vision experts of
    ERNIE-VL), or ran more than once, is kept call by call, as blocks of its own.
    """
    by_owner: dict[str, list[RecordedPass]] = {site.owner: [] for site in sites}
    for one in passes:
        by_owner[one.owner].append(one)
    routers, indices = [], {}
    blocks: dict[str, tuple[TokenBlock, ...]] = {}
    plans: dict[str, list[list[_Piece]]] = {}
    for site in sites:
        run = by_owner[site.owner]
        regular = all(one.is_regular(site) for one in run)
        key = (site.owner or "model") if regular else site.fqn
        if regular:
            if key not in plans:
                plans[key] = _plan(run)
                blocks[key] = tuple(_block(pieces) for pieces in plans[key])
            indices[site.fqn] = _sequences(site, plans[key])
        else:
            calls = [call.cpu() for one in run for call in one.others.get(site.fqn, ())]
            blocks[key] = tuple(TokenBlock(1, call.shape[0]) for call in calls)
            indices[site.fqn] = torch.cat(calls)
        routers.append(
            Router(
                site.fqn,
                site.layer,
                site.num_experts,
                site.top_k,
                key,
                site.repeats,
                site.num_groups,
                site.top_k_groups,
            )
        )
    return Routes(
        routers=tuple(routers),
        indices=_one_dtype(sites, indices),
        blocks=blocks,
        model_type=model_type(model),
        num_layers=num_layers(model, sites),
    )


@dataclass(slots=True, eq=False)
class _Piece:
    """The first `keep` positions of a pass; of nothing known where `source` is None."""

    source: RecordedPass | None
    batch_size: int
    keep: int


def _plan(passes: Sequence[RecordedPass]) -> list[list[_Piece]]:
    blocks: list[list[_Piece]] = []
    length = 0
    for one in passes:
        tokens = one.tokens
        pieces = blocks[-1] if blocks else None
        continues = (
            pieces is not None
            and 0 < tokens.past <= length
            and pieces[0].batch_size == tokens.batch_size
        )
        if pieces is None or not continues:
            pieces = []
            blocks.append(pieces)
            length = 0
            if tokens.past:  # Cached before the recording began.
                pieces.append(_Piece(None, tokens.batch_size, tokens.past))
                length = tokens.past
        while length > tokens.past:  # Taken back, as assisted decoding does.
            surplus = min(length - tokens.past, pieces[-1].keep)
            pieces[-1].keep -= surplus
            length -= surplus
            if not pieces[-1].keep:
                pieces.pop()
        pieces.append(_Piece(one, tokens.batch_size, tokens.length))
        length += tokens.length
    return blocks


def _block(pieces: Sequence[_Piece]) -> TokenBlock:
    batch_size = pieces[0].batch_size
    length = sum(piece.keep for piece in pieces)
    masks = []
    for piece in pieces:
        real = None if piece.source is None else piece.source.tokens.real
        masks.append(
            torch.ones(batch_size, piece.keep, dtype=torch.bool)
            if real is None
            else real[:, : piece.keep].cpu()
        )
    mask = torch.cat(masks, dim=1)
    return TokenBlock(
        batch_size,
        length,
        real=None if bool(mask.all()) else mask,
        prompt=pieces[0].keep if len(pieces) > 1 else None,
    )


def _sequences(site: RouterSite, blocks: Sequence[Sequence[_Piece]]) -> torch.Tensor:
    """Return the rows of one router, block by block and sequence by sequence, pads as -1."""
    parts = []
    for pieces in blocks:
        columns = []
        for piece in pieces:
            shape = (piece.batch_size, -1, site.top_k)
            rows = None if piece.source is None else piece.source.rows(site)
            if rows is None:
                count = piece.batch_size * piece.keep
                rows = torch.full((count, site.top_k), LIVE, dtype=torch.int32)
            columns.append(rows.reshape(shape)[:, : piece.keep])
        device = columns[-1].device
        wide = torch.cat([column.to(device) for column in columns], dim=1).cpu()
        real = _block(pieces).real
        if real is not None:
            wide = wide.to(torch.int32).masked_fill(~real.unsqueeze(-1), LIVE)
        parts.append(wide.flatten(0, 1))
    return torch.cat(parts) if parts else torch.empty(0, site.top_k, dtype=torch.uint8)


def _one_dtype(
    sites: Sequence[RouterSite], indices: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    has_live = any(bool((index < 0).any()) for index in indices.values() if index.dtype.is_signed)
    dtype = smallest_dtype(max(site.num_experts for site in sites), has_live=has_live)
    return {fqn: index.to(dtype) for fqn, index in indices.items()}


def model_type(model: nn.Module) -> str:
    """Return `model_type` of a model's text config, "" if it has no config."""
    return str(getattr(_text_config(model), "model_type", "") or "")


def num_layers(model: nn.Module, sites: Sequence[RouterSite]) -> int:
    """Return how many layers stand beside the last router's, itself included; 0 if unknown.

    Counted in the model and not taken from its config, where the number may be of something else:
    `num_hidden_layers` of LongCat-Flash counts each of its layers twice.
    """
    site = sites[-1]
    inside = site.fqn.removeprefix(site.owner + ".") if site.owner else site.fqn
    parts = inside.split(".")
    ends = [place for place, part in enumerate(parts) if part.isdigit()]
    try:
        layers = site.owner_module.get_submodule(".".join(parts[: ends[0]])) if ends else None
    except AttributeError:
        layers = None  # A wrapper in between.
    if layers is not None:
        return len(list(layers.children()))
    number = getattr(_text_config(model), "num_hidden_layers", None)
    return number if isinstance(number, int) else 0


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    if config is None:  # A wrapper: the first model inside that has one.
        config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
