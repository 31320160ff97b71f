"""Routing traces: which experts each token of a run went to, layer by layer.

A trace is plain data: one small integer tensor for each router and, for the tokens, which
sequences they are. It knows no model; `record` fills it, `replay` reads it, `interop` and `store`
turn it into other forms and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from patchlab.errors import RoutingError
from patchlab.render.shown import Shown

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

    from patchlab.render.rows import Table
    from patchlab.routing.agreement import RoutingAgreement
    from patchlab.routing.statistics import RoutingBalance

LIVE = -1
"""The entry of a token slot whose expert is not known; a replay lets the router choose it."""


@dataclass(frozen=True, slots=True)
class Router:
    """What a trace knows of one router.

    Attributes:
        fqn: Its name in the model that was recorded.
        layer: Index of the layer it sits in, -1 if its FQN has no number.
        num_experts: Experts it chooses from.
        top_k: Experts for each token.
        tokens: Key of the token blocks that its rows are, see `RoutingTrace.blocks`.
        repeats: Whether one token may have the same expert twice.
        num_groups: Groups that its experts are in, 1 without groups.
        top_k_groups: In how many of them all experts of a token lie.
    """

    fqn: str
    layer: int
    num_experts: int
    top_k: int
    tokens: str
    repeats: bool = False
    num_groups: int = 1
    top_k_groups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """Sequences that ran together: consecutive rows of a trace, sequence by sequence.

    Attributes:
        batch_size: Sequences.
        length: Positions of each, padding included.
        real: Bool tensor `(batch_size, length)`, False on padding; None where nothing is known to
            be padding.
        prompt: Positions before the first generated one; None if all ran in one pass. Sequences of
            a block that was generated may end earlier than the block.
        is_flat: Whether batch and sequence are not known apart, only the number of tokens.
    """

    batch_size: int
    length: int
    real: torch.Tensor | None = None
    prompt: int | None = None
    is_flat: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the block."""
        return self.batch_size * self.length


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The content of a trace; what `RoutingTrace` describes."""

    routers: tuple[Router, ...]
    indices: Mapping[str, torch.Tensor]
    blocks: Mapping[str, tuple[TokenBlock, ...]]
    model_type: str = ""
    num_layers: int = 0


def smallest_dtype(num_experts: int, *, has_live: bool) -> torch.dtype:
    """Return the smallest integer type that holds the experts, and -1 if there are live slots."""
    if has_live:
        return torch.int8 if num_experts <= 1 << 7 else _signed(num_experts)
    return torch.uint8 if num_experts <= 1 << 8 else _signed(num_experts)


def _signed(num_experts: int) -> torch.dtype:
    return torch.int16 if num_experts <= 1 << 15 else torch.int32


class RoutingTrace(Shown):
    """Which experts each token went to, for each router of a model.

    Given by `record_routing`, `from_list`, `from_vllm` and the like. Inside `record_routing`'s
    block it grows with each forward; afterwards it does not change. A forward that fails or is
    interrupted is not in it.

    Rows are tokens in the order in which they ran, sequence by sequence: with a batch, all
    positions of the first sequence come before those of the second. What `generate` ran in steps,
    prefill and decode, is joined to whole sequences, so that a replay over the finished sequences
    fits; the last token was never run, so its row is not there.
    """

    def __init__(self, routes: Routes | Callable[[], Routes]) -> None:
        self._routes = routes

    def close(self) -> None:
        """Let the trace stay as it is; `record_routing` calls it when its block ends."""
        self._routes = self.routes

    # --- content  --------------------------------------------------------------------------------

    @property
    def routes(self) -> Routes:
        """The content as one value; while recording, as of now."""
        return self._routes() if callable(self._routes) else self._routes

    @property
    def routers(self) -> tuple[Router, ...]:
        """The routers, in layer order."""
        return self.routes.routers

    @property
    def layers(self) -> tuple[str, ...]:
        """FQNs of the routers, in layer order. Layers without a router are not among them."""
        return tuple(router.fqn for router in self.routers)

    @property
    def indices(self) -> Mapping[str, torch.Tensor]:
        """By router, the experts `(num_tokens, top_k)`, on the CPU, in the smallest integer type.

        The order of a row is the router's own: by falling score, where the family sorts. -1 is
        a slot whose expert is not known: padding, and tokens a cache held already.
        """
        return MappingProxyType(dict(self.routes.indices))

    @property
    def blocks(self) -> Mapping[str, tuple[TokenBlock, ...]]:
        """Which sequences the rows are.

        One entry for each model around routers: "model" in a decoder-only model, and for an
        encoder-decoder one for each half. A router that gets only some of the tokens has one of its
        own, under its FQN.
        """
        return MappingProxyType(dict(self.routes.blocks))

    @property
    def model_type(self) -> str:
        """`config.model_type` of the language model."""
        return self.routes.model_type

    @property
    def num_layers(self) -> int:
        """Layers of the model, those without a router too; 0 if the model does not say."""
        return self.routes.num_layers

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have no router."""
        routed = {router.layer for router in self.routers}
        return tuple(layer for layer in range(self.num_layers) if layer not in routed)

    @property
    def num_experts(self) -> int:
        """Experts each router chooses from; the most, if routers differ."""
        return max(router.num_experts for router in self.routers)

    @property
    def top_k(self) -> int:
        """Experts of each token; the most, if routers differ."""
        return max(router.top_k for router in self.routers)

    @property
    def num_tokens(self) -> int:
        """Rows of the last router: the tokens of the decoder, padding included."""
        routes = self.routes
        return int(routes.indices[routes.routers[-1].fqn].shape[0])

    @property
    def num_sequences(self) -> int:
        """Sequences of the last router's tokens."""
        routes = self.routes
        return sum(block.batch_size for block in routes.blocks[routes.routers[-1].tokens])

    @property
    def nbytes(self) -> int:
        """Bytes that the experts take."""
        return sum(index.nbytes for index in self.routes.indices.values())

    def __len__(self) -> int:
        return self.num_tokens

    # No hash goes with it, since a trace grows while it is recorded.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        from patchlab.routing.agreement import same_routes

        return same_routes(self.routes, other.routes)

    # --- parts  ----------------------------------------------------------------------------------

    def sequence(self, number: int) -> RoutingTrace:
        """Return the trace of one sequence, without its padding.

        Raises:
            RoutingError: There is no such sequence, or routers saw different tokens (an
                encoder-decoder), of which "one sequence" cannot be told.
        """
        routes = self.routes
        key = self._one_kind_of_tokens()
        row, seen, found = 0, 0, None
        for block in routes.blocks[key]:
            if number in range(seen, seen + block.batch_size):
                found = block
                row += (number - seen) * block.length
                break
            seen += block.batch_size
            row += block.num_tokens
        if found is None:
            raise RoutingError(f"sequence {number!r} of a trace of {seen}: count from 0.")
        rows = slice(row, row + found.length)
        keep = None if found.real is None else found.real[number - seen]
        indices = {
            fqn: index[rows] if keep is None else index[rows][keep]
            for fqn, index in routes.indices.items()
        }
        length = found.length if keep is None else int(keep.sum())
        block = TokenBlock(1, length, is_flat=found.is_flat)
        return RoutingTrace(replace(routes, indices=indices, blocks={key: (block,)}))

    def rows_by_sequence(self, fqn: str) -> list[torch.Tensor]:
        """Return, for a router, the rows of each sequence, padding left out."""
        routes = self.routes
        key = next(router.tokens for router in routes.routers if router.fqn == fqn)
        found, row = [], 0
        for block in routes.blocks[key]:
            for number in range(block.batch_size):
                rows = torch.arange(row, row + block.length)
                found.append(rows if block.real is None else rows[block.real[number]])
                row += block.length
        return found

    def _one_kind_of_tokens(self) -> str:
        keys = {router.tokens for router in self.routers}
        if len(keys) > 1:
            raise RoutingError(
                f"the routers of this trace saw different tokens ({', '.join(sorted(keys))}), so "
                f"they cannot be one array. Read trace.indices router by router."
            )
        return keys.pop()

    # --- other forms  ----------------------------------------------------------------------------

    def to_list(self) -> list[torch.Tensor]:
        """Return the experts as int64 tensors `(num_tokens, top_k)`, one for each router.

        The form of the transformers guide to monkey patching. -1 stays -1, which its
        `replay_moe_routing` cannot use and `replay_routing` can.
        """
        return [self.routes.indices[fqn].long() for fqn in self.layers]

    @classmethod
    def from_list(cls, model: nn.Module, tensors: Iterable[Any]) -> RoutingTrace:
        """Make a trace of one `(num_tokens, top_k)` tensor for each router, in layer order."""
        from patchlab.routing.interop import trace_of_list

        return trace_of_list(model, tensors)

    @classmethod
    def from_vllm(cls, model: nn.Module, array: Any, *, prompt: Any = None) -> RoutingTrace:
        """Make a trace of vLLM's `routed_experts`; see `interop.trace_of_arrays`."""
        from patchlab.routing.interop import trace_of_arrays

        return trace_of_arrays(model, array, prompt=prompt)

    @classmethod
    def from_sglang(cls, model: nn.Module, data: Any) -> RoutingTrace:
        """Make a trace of SGLang's base64 of int32; see `interop.trace_of_sglang`."""
        from patchlab.routing.interop import trace_of_sglang

        return trace_of_sglang(model, data)

    @classmethod
    def from_verl(cls, model: nn.Module, array: Any, attention_mask: Any = None) -> RoutingTrace:
        """Make a trace of verl's padded `(batch, length, layers, top_k)`; see `interop`."""
        from patchlab.routing.interop import trace_of_batch

        return trace_of_batch(model, array, attention_mask)

    def to_vllm(self, *, dense: bool = True) -> np.ndarray[Any, Any]:
        """Return the one sequence as vLLM does, `(num_tokens, layers, top_k)`.

        Args:
            dense: Every layer of the model, zeros where it has no router, in uint8 up to 256
                experts and uint16 above. Otherwise the layers with a router only, in int16, with -1
                where a route is not known, as newer versions have it.

        Raises:
            RoutingError: Several sequences (take one with `sequence`), unknown routes in a form
                that cannot say so, or routers that do not fit one array.
        """
        from patchlab.routing.interop import array_of_trace

        return array_of_trace(self, dense=dense)

    def to_sglang(self) -> str:
        """Return the one sequence as SGLang does: base64 of int32 `(tokens, layers, top_k)`."""
        from patchlab.routing.interop import sglang_of_trace

        return sglang_of_trace(self)

    def to_verl(self) -> torch.Tensor:
        """Return an int16 tensor `(batch, length, layers with a router, top_k)`, -1 on padding."""
        from patchlab.routing.interop import batch_of_trace

        return batch_of_trace(self)

    def save(self, path: str | Path) -> None:
        """Write the trace as a safetensors file; see `store`."""
        from patchlab.routing.store import save_trace

        save_trace(self, path)

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Read a trace that `save` wrote.

        Raises:
            RoutingError: The file is none, or of a version this patchlab does not know.
        """
        from patchlab.routing.store import load_trace

        return load_trace(path)

    # --- statistics  -----------------------------------------------------------------------------

    def load_per_expert(self) -> dict[str, torch.Tensor]:
        """Count, by router, the token slots that go to each expert; int64 `(num_experts,)`."""
        from patchlab.routing.statistics import expert_load

        routes = self.routes
        return {
            router.fqn: expert_load(routes.indices[router.fqn], router.num_experts)
            for router in routes.routers
        }

    def balance(self) -> RoutingBalance:
        """Return how evenly each layer uses its experts."""
        from patchlab.routing.statistics import balance_of

        return balance_of(self)

    def agreement(self, other: RoutingTrace) -> RoutingAgreement:
        """Return how far two traces of the same tokens agree, by layer and by token.

        Raises:
            RoutingError: They are of other routers or of other numbers of tokens.
        """
        from patchlab.routing.agreement import agreement_of

        return agreement_of(self, other)

    def plot(self, **options: Any) -> Any:
        """Return a matplotlib figure of the load, layer × expert; see `render.plots`."""
        from patchlab.routing.statistics import plot_load

        return plot_load(self, **options)

    def to_table(self, **options: Any) -> Table:
        """Return one row for each router, with its load."""
        from patchlab.routing.statistics import trace_table

        return trace_table(self)

    def to_frame(self) -> Any:
        """Return a pandas frame with one row for each token and router.

        Columns: `token`, `layer`, `router`, and `expert_0` … one for each slot, in rank order; -1
        where the expert is not known.
        """
        from patchlab.routing.statistics import trace_frame

        return trace_frame(self)
