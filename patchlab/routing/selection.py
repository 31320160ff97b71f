"""The choice itself: seeing, and setting, which experts one call of a router chooses.

While a router's own forward runs, a `TorchFunctionMode` looks at the operations it calls. The one
that chooses experts is answered with indices of ours, and with values *gathered from its own
input*; everything after it (normalizing, scaling, bias correction, gradients) is the model's own
code. Rewriting a router's outputs would need to know all of that, for 75 families; rewriting its
source finds no `topk` call in five of them.

Recording goes the same way, with the router's own indices. Recorded and imposed passes then save
the same tensors for backward, which gradient checkpointing compares when it recomputes a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from patchlab.errors import RoutingError
from patchlab.routing.sites import RouterSite

_TOPK = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)
_MAX = (torch.max, torch.Tensor.max)
_GETITEM = torch.Tensor.__getitem__

# Which of the sparse mixer's calls of `max` choose an expert, by the expert's slot, and which set
# the threshold below which experts are masked (Phimoe, `sparsemixer`, transformers 5.24.0). In
# training the choice is a call of its own, on scores with Gumbel noise.
_MIXER_PICKS = {False: {0: 0, 1: 1}, True: {1: 0, 4: 1}}
_MIXER_THRESHOLDS: dict[bool, dict[int, int]] = {False: {}, True: {0: 0, 3: 1}}

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


class Selection(TorchFunctionMode):
    """Watches one call of a router's forward.

    Args:
        site: The router.
        forced: Int64 tensor `(num_tokens, top_k)` of the experts to choose, on the router's device;
            an entry below 0 is chosen live, by the router itself. None to watch only.
        partial: Whether `forced` has entries below 0 (known beforehand, since asking the tensor
            would make a GPU wait).

    Attributes:
        chosen: The experts chosen, int64 with `top_k` as the last dimension; None if the forward
            made no choice.
    """

    def __init__(
        self, site: RouterSite, forced: torch.Tensor | None = None, *, partial: bool = False
    ) -> None:
        super().__init__()
        self.chosen: torch.Tensor | None = None
        self._site = site
        self._forced = forced
        self._partial = partial
        self._calls = 0
        self._answer = getattr(self, f"_answer_{site.choice}")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:
        """Answer the operation that chooses; let every other one run."""
        return self._answer(func, args, kwargs or {})

    def _merged(self, own: torch.Tensor) -> torch.Tensor:
        """Return the forced experts, shaped as the router's own, which stand where they are < 0."""
        if self._forced is None:
            return own
        forced = self._shaped(self._forced, own.shape)
        return torch.where(forced < 0, own, forced) if self._partial else forced

    def _shaped(self, forced: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if forced.numel() != shape.numel():
            # Only a router that gets some of the tokens comes to this; how many, it alone knows.
            raise RoutingError(
                f"{self._site.fqn} routes {shape.numel() // shape[-1]} rows here, the trace has "
                f"{forced.numel() // shape[-1]} rows for this call. It gets only some of the "
                f"tokens; the inputs must be those of the recording."
            )
        return forced.reshape(shape)

    # --- topk: nearly every family --------------------------------------------------------------

    def _answer_topk(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores, k = _input_and_k(args, kwargs)
        site = self._site
        # The last such call of a forward is the choice: with one group, DeepSeek-V3 also takes the
        # best two of all experts to score that group, and answering both does no harm.
        if k == site.top_k and scores.shape[-1] in site.widths:
            if self._forced is None or self._partial:
                with torch.no_grad():
                    own = func(*args, **kwargs).indices
                index = self._merged(own)
            else:
                index = self._shaped(self._forced, torch.Size((*scores.shape[:-1], k)))
            self.chosen = index
            return torch.return_types.topk((scores.gather(-1, index), index))
        if k == site.top_k_groups and scores.shape[-1] == site.num_groups > 1:
            return self._choose_groups(func, scores, k, args, kwargs)
        return func(*args, **kwargs)

    def _choose_groups(
        self,
        func: Callable[..., Any],
        scores: torch.Tensor,
        k: int,
        args: Arguments,
        kwargs: Keywords,
    ) -> Any:
        # Experts outside the chosen groups are masked out, in DeepSeek-V2 to a weight of exactly
        # zero with no gradient. So the groups of the forced experts are chosen first.
        with torch.no_grad():
            if self._forced is None:
                index = func(*args, **kwargs).indices
            else:
                per_group = self._site.num_experts // self._site.num_groups
                forced = self._forced.reshape(*scores.shape[:-1], -1)
                wanted = torch.zeros_like(scores).scatter_add_(
                    -1, forced.clamp(min=0) // per_group, (forced >= 0).to(scores.dtype)
                )
                preferred = scores.masked_fill(wanted > 0, float("inf"))
                index = preferred.topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, index), index))

    # --- argmax: Switch Transformers (one expert), NLLB-MoE (two) -------------------------------

    def _answer_argmax(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        if func in _ARGMAX:
            own = func(*args, **kwargs)
            slot, self._calls = self._calls, self._calls + 1
            if slot >= self._site.top_k:
                return own
            index = self._slot(own, slot)
            self._add_slot(index, slot)
            return index
        if (
            func in _MAX
            and self._site.top_k == 1
            and self.chosen is not None
            and (len(args) > 1 or "dim" in kwargs)
        ):
            # Switch takes the chosen expert's probability as the largest one.
            scores = args[0]
            return torch.return_types.max(
                (scores.gather(-1, self.chosen).squeeze(-1), self.chosen.squeeze(-1))
            )
        return func(*args, **kwargs)

    def _slot(self, own: torch.Tensor, slot: int) -> torch.Tensor:
        if self._forced is None:
            return own
        forced = self._forced[..., slot].reshape(own.shape)
        return torch.where(forced < 0, own, forced) if self._partial else forced

    def _add_slot(self, index: torch.Tensor, slot: int) -> None:
        column = index.unsqueeze(-1)
        previous = self.chosen
        self.chosen = (
            column if slot == 0 or previous is None else torch.cat([previous, column], dim=-1)
        )

    # --- max of a sparse mixer: Phimoe -----------------------------------------------------------

    def _answer_mixer(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        if func not in _MAX or not (len(args) > 1 or "dim" in kwargs):
            return func(*args, **kwargs)
        training = self._site.module.training
        call, self._calls = self._calls, self._calls + 1
        thresholds, picks = _MIXER_THRESHOLDS[training], _MIXER_PICKS[training]
        if call not in picks and call not in thresholds:
            return func(*args, **kwargs)
        scores, keepdim = args[0], bool(kwargs.get("keepdim", len(args) > 2 and args[2]))
        with torch.no_grad():
            out: Any = func(*args, **kwargs)
        own = out.indices.squeeze(-1) if keepdim else out.indices
        if call in thresholds:
            return self._lowered(out, scores, self._slot(own, thresholds[call]))
        index = self._slot(own, picks[call])
        self._add_slot(index, picks[call])
        if not training:
            # In evaluation the same call sets the threshold.
            return self._lowered(out, scores, index)
        column = index.unsqueeze(-1)
        value = scores.gather(-1, column)
        parts = (value, column) if keepdim else (value.squeeze(-1), index)
        return torch.return_types.max(parts)

    def _lowered(self, out: Any, scores: torch.Tensor, index: torch.Tensor) -> Any:
        """Return the maximum, lowered to the chosen expert's score where that would be masked.

        The mixer masks experts whose score is further below the maximum than the jitter allows. A
        chosen expert under the mask would get a weight of zero and no gradient.
        """
        column = index.unsqueeze(-1)
        own = scores.gather(-1, column)
        factor = torch.maximum(own.abs(), out.values)
        allowed = 2 * float(cast("float", self._site.module.router_jitter_noise))
        masked = ((out.values - own) / factor) > allowed
        return torch.return_types.max((torch.where(masked, own, out.values), column))

    # --- table look-up: the hash layers of DeepSeek-V4 ------------------------------------------

    def _answer_table(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        out = func(*args, **kwargs)
        if func is _GETITEM and args[0] is self._site.module.tid2eid:
            self.chosen = out = self._merged(out.long())
        return out

    # --- product keys: Doge ---------------------------------------------------------------------

    def _answer_product(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores, _ = _input_and_k(args, kwargs)
        if not self._calls:
            # The first call sorts the keys of both halves; an expert is a pair of them. Left in
            # their own order, a position in the table of pairs *is* the expert.
            self._calls = 1
            order = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
            return torch.return_types.topk((scores, order))
        with torch.no_grad():
            own = func(*args, **kwargs).indices
        self.chosen = self._merged(own)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))


def _input_and_k(args: Arguments, kwargs: Keywords) -> tuple[torch.Tensor, int]:
    scores = args[0] if args else kwargs["input"]
    return scores, args[1] if len(args) > 1 else kwargs["k"]


def chosen_in_output(site: RouterSite, output: Any) -> torch.Tensor | None:
    """Return the one integer tensor `(..., top_k)` in a router's output, None if there is no one.

    For routers that were handed their experts and made no choice of their own, as the replayable
    router of the transformers guide to monkey patching does.
    """
    parts = output if isinstance(output, tuple) else (output,)
    found = [
        part
        for part in parts
        if isinstance(part, torch.Tensor)
        and not part.is_floating_point()
        and part.dtype is not torch.bool
        and part.dim() >= 2
        and part.shape[-1] == site.top_k
    ]
    return found[0] if len(found) == 1 else None


def no_choice(site: RouterSite) -> RoutingError:
    """Build the error for a router whose forward made no choice that could be seen."""
    return RoutingError(
        f"{site.fqn} ({site.class_name}) ran and made no choice of {site.top_k} out of "
        f"{site.num_experts} experts that could be seen. A kernel or a patch may have replaced the "
        f"operation that chooses ({site.choice}); load the model without it to record or replay "
        f"its routing."
    )
