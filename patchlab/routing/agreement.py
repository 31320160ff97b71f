"""Agreement: how far two traces of the same tokens agree, as a rollout and a training step should.

Arithmetic in another type, another kernel or another batch moves scores that nearly tie, and a
token goes elsewhere in one layer and so in the next. How often, and where, this file counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patchlab.errors import RoutingError
from patchlab.render.frames import frame_of
from patchlab.render.rows import Column, Row, Table
from patchlab.render.shown import Shown
from patchlab.routing.fit import tails
from patchlab.routing.trace import Routes, RoutingTrace, TokenBlock


@dataclass(frozen=True, slots=True)
class LayerAgreement:
    """How far two traces agree for one router.

    Attributes:
        router: Its FQN in the first trace.
        layer: Index of its layer.
        tokens: Tokens compared: those whose experts both traces know.
        same_sets: How many of them have the same experts, in whatever order.
        overlap: Share of token slots whose expert the other trace has for that token too.
    """

    router: str
    layer: int
    tokens: int
    same_sets: int
    overlap: float


@dataclass(frozen=True)
class RoutingAgreement(Shown):
    """How far two traces of the same tokens agree.

    Attributes:
        layers: By router, in layer order.
        by_token: For each token, in how many layers its experts differ; -1 where one of the traces
            does not know.
    """

    layers: tuple[LayerAgreement, ...]
    by_token: tuple[int, ...]

    @property
    def same_sets(self) -> float:
        """Share of (token, layer) pairs with the same experts; 1 if all agree."""
        tokens = sum(one.tokens for one in self.layers)
        return sum(one.same_sets for one in self.layers) / tokens if tokens else 1.0

    @property
    def overlap(self) -> float:
        """Share of token slots whose expert is in both traces."""
        tokens = sum(one.tokens for one in self.layers)
        return sum(one.overlap * one.tokens for one in self.layers) / tokens if tokens else 1.0

    @property
    def same_tokens(self) -> float:
        """Share of tokens that have the same experts in every layer."""
        known = [number for number in self.by_token if number >= 0]
        return sum(number == 0 for number in known) / len(known) if known else 1.0

    @property
    def ok(self) -> bool:
        """Whether all experts agree."""
        return all(one.same_sets == one.tokens for one in self.layers)

    def to_table(self, **options: Any) -> Table:
        """Return one row for each router."""
        return Table(
            columns=(
                Column("Router", mono=True),
                Column("Tokens", "right"),
                Column("Same experts", "right"),
                Column("Overlap", "right"),
            ),
            rows=tuple(
                Row(
                    depth=0,
                    label=one.router,
                    cells=(
                        f"{one.tokens:,}",
                        _share(one.same_sets, one.tokens),
                        f"{one.overlap:.1%}",
                    ),
                    tone="plain" if one.same_sets == one.tokens else "warning",
                    mark="" if one.same_sets == one.tokens else "~",
                    note="" if one.same_sets == one.tokens else "differs",
                )
                for one in self.layers
            ),
            caption=(
                f"{self.same_sets:.1%} of (token, layer) pairs have the same experts · "
                f"{self.same_tokens:.1%} of tokens have them in every layer"
            ),
            caption_tone="ok" if self.ok else "warning",
        )

    def to_frame(self) -> Any:
        """Return a pandas frame with one row for each router, numbers as numbers."""
        return frame_of(
            {
                "layer": [one.layer for one in self.layers],
                "router": [one.router for one in self.layers],
                "tokens": [one.tokens for one in self.layers],
                "same_sets": [one.same_sets for one in self.layers],
                "overlap": [one.overlap for one in self.layers],
            }
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "—"


def agreement_of(first: RoutingTrace, second: RoutingTrace) -> RoutingAgreement:
    """Compare two traces token by token; see `RoutingTrace.agreement`.

    Raises:
        RoutingError: `second` is no trace, one of them has no tokens, or they are of other routers
            or tokens.
    """
    if not isinstance(second, RoutingTrace):
        raise RoutingError(
            f"a trace agrees with another one, not with a {type(second).__name__}. Of an engine's "
            f"arrays make one first: RoutingTrace.from_vllm(model, array)."
        )
    for trace, which in ((first, "this"), (second, "the other")):
        if not trace.num_sequences:
            raise RoutingError(
                f"{which} trace has no tokens: no forward ran while it was recorded."
            )
    names = partners(first, second)
    layers, differing = [], []
    one, other = first.indices, second.indices
    for router in first.routers:
        partner = names[router.fqn]
        rows, partner_rows = paired_rows(first, second, router.fqn, partner)
        a, b = one[router.fqn][rows].long(), other[partner][partner_rows].long()
        if a.shape != b.shape:
            raise RoutingError(
                f"{router.fqn} has {router.top_k} experts for each token in one trace and "
                f"{b.shape[-1]} in the other."
            )
        known = (a >= 0).all(dim=-1) & (b >= 0).all(dim=-1)
        same = (a.sort(dim=-1).values == b.sort(dim=-1).values).all(dim=-1)
        shared = (a.unsqueeze(-1) == b.unsqueeze(-2)).any(dim=-1)[known]
        layers.append(
            LayerAgreement(
                router.fqn,
                router.layer,
                int(known.sum()),
                int((same & known).sum()),
                float(shared.float().mean()) if shared.numel() else 1.0,
            )
        )
        differing.append(torch.where(known, (~same).long(), -1))
    return RoutingAgreement(tuple(layers), _by_token(differing))


def _by_token(differing: Sequence[torch.Tensor]) -> tuple[int, ...]:
    if len({len(one) for one in differing}) > 1:
        return ()  # Routers of two towers: there is no one list of tokens.
    stacked = torch.stack(list(differing))
    number = stacked.clamp(min=0).sum(dim=0)
    return tuple(torch.where((stacked < 0).any(dim=0), -1, number).tolist())


def partners(first: RoutingTrace, second: RoutingTrace) -> dict[str, str]:
    """Return, by router of the first trace, the same router in the second.

    Raises:
        RoutingError: The traces are of other routers.
    """
    ours, theirs = tails(first.layers), tails(second.layers)
    names = {theirs[fqn]: fqn for fqn in second.layers}
    if set(names) != set(ours.values()):
        raise RoutingError(
            f"the traces are of other routers: {len(ours)} ({first.layers[0]} …) and {len(theirs)} "
            f"({second.layers[0]} …)."
        )
    return {fqn: names[tail] for fqn, tail in ours.items()}


def paired_rows(
    first: RoutingTrace, second: RoutingTrace, fqn: str, partner: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the tokens that both traces have, sequence by sequence.

    Raises:
        RoutingError: The traces are of other tokens.
    """
    ours, theirs = first.rows_by_sequence(fqn), second.rows_by_sequence(partner)
    if len(ours) != len(theirs):
        # One of them came as rows without sequences.
        ours, theirs = [torch.cat(ours)], [torch.cat(theirs)]
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        # A generation never runs its last token, a training step does.
        if abs(len(a) - len(b)) > 1:
            raise RoutingError(
                f"sequence {number} has {len(a)} tokens in one trace and {len(b)} in the other. "
                f"Two traces can be compared if they are of the same tokens; the last one may be "
                f"missing."
            )
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def same_routes(a: Routes, b: Routes) -> bool:
    """Return whether two traces have the same content, whatever integer type their experts are."""
    return (
        (a.routers, a.model_type, a.num_layers) == (b.routers, b.model_type, b.num_layers)
        and a.indices.keys() == b.indices.keys()
        and all(_same_tensor(index, b.indices[fqn]) for fqn, index in a.indices.items())
        and a.blocks.keys() == b.blocks.keys()
        and all(
            len(blocks) == len(b.blocks[key]) and all(map(_same_block, blocks, b.blocks[key]))
            for key, blocks in a.blocks.items()
        )
    )


def _same_block(a: TokenBlock, b: TokenBlock) -> bool:
    sizes = (a.batch_size, a.length, a.prompt, a.is_flat)
    return sizes == (b.batch_size, b.length, b.prompt, b.is_flat) and _same_tensor(a.real, b.real)


def _same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool((a == b).all())
