"""Statistics: how evenly a trace uses the experts.

Load is counted in token slots: a token with `top_k` experts fills `top_k` of them. Against an even
spread, the *ideal* load of each expert is `num_tokens * top_k / num_experts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patchlab.errors import RoutingError
from patchlab.render.frames import frame_of
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table
from patchlab.render.shown import Shown
from patchlab.routing.trace import RoutingTrace

# Above twice the ideal load an expert takes the work of two, and a pass over sharded experts waits
# for it; entropy below 0.9 is about what a router without balancing has (DeepSeek-V3 keeps 0.97+).
_BUSY = 2.0


def expert_load(top_k_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the token slots that go to each expert of one layer.

    Args:
        top_k_index: Integer tensor of shape `(num_tokens, top_k)`, the experts chosen for each
            token. Entries below 0, whose expert is not known, are not counted.
        num_experts: Experts in the layer, `config.num_experts`.

    Returns:
        Int64 tensor of shape `(num_experts,)`, summing to the slots that are known. Divide by
        `num_tokens` for the share of tokens; the shares sum to `top_k`, not to 1.

    Raises:
        RoutingError: An index is `num_experts` or more, as when the trace was recorded on a model
            with more experts.

    Example:
        >>> expert_load(torch.tensor([[0, 2], [2, 3]]), num_experts=4)
        tensor([1, 0, 2, 1])
    """
    known = top_k_index[top_k_index >= 0].long()
    if known.numel() and int(known.max()) >= num_experts:
        raise RoutingError(
            f"expert {int(known.max())} in a layer of {num_experts}, counted from 0. The trace was "
            f"recorded on a model with more experts."
        )
    return torch.bincount(known, minlength=num_experts)


# --- balance -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerBalance:
    """How evenly one router uses its experts.

    Attributes:
        router: Its FQN.
        layer: Index of its layer.
        load: Token slots of each expert.
    """

    router: str
    layer: int
    load: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Token slots in all."""
        return sum(self.load)

    @property
    def ideal(self) -> float:
        """Slots of each expert if all had the same."""
        return self.slots / len(self.load)

    @property
    def busiest(self) -> float:
        """Load of the busiest expert as a multiple of the ideal; 1 is even, `num_experts` worst.

        The violation that DeepSeek reports as MaxVio is this less 1.
        """
        return max(self.load) / self.ideal if self.slots else 0.0

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that no token goes to."""
        return tuple(expert for expert, load in enumerate(self.load) if not load)

    @property
    def entropy(self) -> float:
        """Entropy of the load as a share of the largest possible: 1 is even, 0 one expert only."""
        if not self.slots or len(self.load) < 2:
            return 0.0
        shares = [load / self.slots for load in self.load if load]
        spread = -sum(share * math.log(share) for share in shares) / math.log(len(self.load))
        return max(spread, 0.0)  # One expert only gives -0.0.

    @property
    def variation(self) -> float:
        """Standard deviation of the load as a multiple of the ideal; 0 is even."""
        if not self.slots:
            return 0.0
        squares = sum((load - self.ideal) ** 2 for load in self.load)
        return math.sqrt(squares / len(self.load)) / self.ideal

    def dropped(self, capacity_factor: float) -> float:
        """Return the share of slots that experts of this capacity would turn away.

        Args:
            capacity_factor: Slots an expert takes, as a multiple of the ideal.
        """
        capacity = capacity_factor * self.ideal
        return (
            sum(max(load - capacity, 0.0) for load in self.load) / self.slots if self.slots else 0
        )


@dataclass(frozen=True)
class RoutingBalance(Shown):
    """How evenly the routers of a trace use their experts."""

    layers: tuple[LayerBalance, ...]

    def to_table(self, **options: Any) -> Table:
        """Return one row for each router."""
        return _balance_table(self.layers, _balance_caption(self.layers))

    def to_frame(self) -> Any:
        """Return a pandas frame with one row for each router, numbers as numbers."""
        return frame_of(
            {
                "layer": [one.layer for one in self.layers],
                "router": [one.router for one in self.layers],
                "slots": [one.slots for one in self.layers],
                "busiest": [one.busiest for one in self.layers],
                "entropy": [one.entropy for one in self.layers],
                "variation": [one.variation for one in self.layers],
                "dead": [len(one.dead) for one in self.layers],
            }
        )


def balance_of(trace: RoutingTrace) -> RoutingBalance:
    """Count the load of each router of a trace."""
    loads = trace.load_per_expert()
    return RoutingBalance(
        tuple(
            LayerBalance(router.fqn, router.layer, tuple(loads[router.fqn].tolist()))
            for router in trace.routers
        )
    )


def _balance_caption(layers: Sequence[LayerBalance]) -> str:
    dead = sum(len(one.dead) for one in layers)
    experts = sum(len(one.load) for one in layers)
    busiest = max(layers, key=lambda one: one.busiest)
    return (
        f"{count(len(layers), 'router')} · busiest expert {busiest.busiest:.2f} × the ideal load, "
        f"in layer {busiest.layer} · {dead} of {experts:,} experts unused"
    )


def _balance_table(layers: Sequence[LayerBalance], caption: str) -> Table:
    return Table(
        columns=(
            Column("Router", mono=True),
            Column("Experts", "right"),
            Column("Slots", "right"),
            Column("Busiest", "right"),
            Column("Entropy", "right"),
            Column("Unused", "right"),
        ),
        rows=tuple(
            Row(
                depth=0,
                label=one.router,
                cells=(
                    str(len(one.load)),
                    f"{one.slots:,}",
                    f"{one.busiest:.2f} ×",
                    f"{one.entropy:.3f}",
                    str(len(one.dead)),
                ),
                tone="warning" if one.busiest > _BUSY or one.dead else "plain",
                note=_balance_note(one),
                title=f"load of each expert: {', '.join(map(str, one.load[:64]))}",
            )
            for one in layers
        ),
        caption=caption,
        footer=("Busiest: the largest load against an even one. Entropy: 1 is even.",),
    )


def _balance_note(one: LayerBalance) -> str:
    notes = []
    if one.busiest > _BUSY:
        notes.append("overloaded")
    if one.dead:
        notes.append("unused experts")
    return ", ".join(notes)


# --- a trace itself ------------------------------------------------------------------------------


def trace_table(trace: RoutingTrace) -> Table:
    """Return the rows in which a trace is shown: its routers and their load."""
    layers = balance_of(trace).layers
    dense = len(trace.dense_layers)
    parts = [
        f"{trace.num_tokens:,} tokens in {count(trace.num_sequences, 'sequence')}",
        f"{count(len(layers), 'router')}" + (f", {count(dense, 'dense layer')}" if dense else ""),
        f"{trace.top_k} of {trace.num_experts} experts",
        f"{trace.nbytes / max(trace.num_tokens, 1):,.0f} bytes per token",
    ]
    family = f"{trace.model_type}: " if trace.model_type else ""
    return _balance_table(layers, family + " · ".join(parts))


def trace_frame(trace: RoutingTrace) -> Any:
    """Return a trace as a pandas frame, one row for each token and router."""
    tokens: list[int] = []
    layers: list[int] = []
    names: list[str] = []
    slots: list[list[int]] = [[] for _ in range(trace.top_k)]
    indices = trace.indices
    for router in trace.routers:
        index = indices[router.fqn]
        number = len(index)
        tokens += range(number)
        layers += [router.layer] * number
        names += [router.fqn] * number
        for place, slot in enumerate(slots):
            slot += index[:, place].tolist() if place < router.top_k else [-1] * number
    columns: dict[str, Sequence[Any]] = {"token": tokens, "layer": layers, "router": names}
    columns.update({f"expert_{place}": slot for place, slot in enumerate(slots)})
    return frame_of(columns)


def plot_load(trace: RoutingTrace, *, title: str | None = None) -> Any:
    """Return a matplotlib figure: the load of each expert against the ideal, by layer."""
    from patchlab.render.plots import heatmap

    layers = balance_of(trace).layers
    return heatmap(
        [[load / one.ideal if one.slots else 0.0 for load in one.load] for one in layers],
        row_labels=[str(one.layer) for one in layers],
        row_title="Layer",
        column_title="Expert",
        value_title="Load against an even one",
        title=title if title is not None else trace_table(trace).caption,
        center=1.0,
    )
