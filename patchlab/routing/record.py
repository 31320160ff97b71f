"""Recording: every forward inside a block leaves which experts its tokens went to.

A recorder notes the choices of one pass and keeps them when the pass has come to its end; a pass
that fails, or that an interrupt cuts short, leaves nothing. `join` makes whole sequences of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from patchlab.errors import PatchlabWarning, RoutingError
from patchlab.routing.attach import watched
from patchlab.routing.join import RecordedPass, join_passes
from patchlab.routing.passes import TokenPass
from patchlab.routing.sites import RouterSite, modules_of, routers_among
from patchlab.routing.trace import Routes, RoutingTrace, smallest_dtype
from patchlab.routing.watch import Watcher, none_ran

# Above so many choices a pass is made small router by router; below, all of it at once, which at
# decode, where each operation costs more than its work, is 8 times fewer operations.
_AT_ONCE = 1 << 14


class Recorder(Watcher):
    """Keeps the choices of the passes it watches."""

    def __init__(self, model: nn.Module, sites: tuple[RouterSite, ...]) -> None:
        super().__init__(sites)
        self.passes: list[RecordedPass] = []
        self._model = model
        self._order = sites
        self._dtype = smallest_dtype(max(site.num_experts for site in sites), has_live=False)
        self._running: dict[str, tuple[TokenPass, dict[str, list[torch.Tensor]]]] = {}
        # By model, the cache of its last pass if that may have run ahead.
        self._ahead: dict[str, Any] = {}
        self._joined: tuple[tuple[int, ...], Routes] | None = None

    def begin_pass(self, owner: str, tokens: TokenPass) -> None:
        """Start the notes of a pass; those of one that never ended are dropped."""
        self._running[owner] = (tokens, {})
        self._ahead.pop(owner, None)

    def chosen(self, site: RouterSite, index: torch.Tensor) -> None:
        """Note a router's choice."""
        if site.owner not in self._running:
            raise RoutingError(
                f"{site.fqn} ran, but no call of {type(site.owner_module).__name__} around it was "
                f"seen, so its tokens cannot be placed. Call the model itself, not a part of it or "
                f"its forward; if it is compiled, hand the compiled model to record_routing, or "
                f"compile it inside the block."
            )
        notes = self._running[site.owner][1].setdefault(site.fqn, [])
        rows = index.detach() if index.dim() == 2 else index.detach().reshape(-1, site.top_k)
        if rows.numel() * len(self._order) > _AT_ONCE:
            rows = rows.to(self._dtype)
        notes.append(rows)

    def end_pass(self, owner: str) -> None:
        """Keep the notes of a pass that has come to its end."""
        running = self._running.pop(owner, None)
        if running is None:
            return
        tokens, notes = running
        if not notes:
            first = next(site for site in self._order if site.owner == owner)
            raise none_ran(first, tokens)
        if tokens.ahead is not None:
            self._ahead[owner] = tokens.ahead
            tokens = replace(tokens, ahead=None)
        self.passes.append(RecordedPass.of(owner, tokens, notes, self._dtype))

    def routes(self) -> Routes:
        """Return what has been recorded so far, as whole sequences."""
        passes, surplus = list(self.passes), self._taken_back()
        of = (len(passes), *(one.tokens.past for one in surplus))
        if self._joined is None or self._joined[0] != of:
            self._joined = of, join_passes(self._model, self._order, [*passes, *surplus])
        return self._joined[1]

    def _taken_back(self) -> list[RecordedPass]:
        """Return an empty pass for each model that has run ahead, after what stays in its cache."""
        found = []
        for owner, cache in self._ahead.items():
            last = next(one for one in reversed(self.passes) if one.owner == owner).tokens
            stays = int(cache.get_seq_length())
            if stays < last.past + last.length:
                tokens = TokenPass(last.batch_size, 0, stays, cached=True)
                found.append(RecordedPass(owner, tokens, (), None, {}))
        return found

    def forget_caches(self) -> None:
        """Let go of the models' caches; nothing is asked of them any more."""
        self._ahead.clear()


@contextmanager
def record_routing(model: nn.Module, *, side_towers: bool = False) -> Iterator[RoutingTrace]:
    """Record which experts each token goes to, for every forward of a model inside a block.

    Works on any model whose routers `find_routers` finds, built and loaded in any way; nothing is
    rebuilt and no weight is touched. `generate` is recorded as the sequences it makes (with
    `use_cache=False` it runs each prefix anew, and that is what is recorded). Inside
    `replay_routing` what is imposed is recorded.

    What runs in this thread (or task) is recorded, and nothing else: each thread may record for
    itself, on one model too. With several ranks each records its own tokens.

    Args:
        model: A base model, one with a head, a compiled or wrapped one.
        side_towers: Also record prediction heads (MTP) and encoders of other modalities.

    Yields:
        The trace; it grows with each forward and is complete when the block ends.

    Raises:
        RoutingError: The model has no router. Later, in a forward: a router makes its choice where
            it cannot be seen (a kernel), or beam search is asked for.

    Example:
        with record_routing(model) as trace:
            model.generate(input_ids, max_new_tokens=8)
        trace.indices["model.layers.0.mlp.gate"].shape  # (16, 8) for a prompt of 9 and 8 new tokens
    """
    modules = modules_of(model)
    recorder = Recorder(model, routers_among(modules, side_towers=side_towers))
    # Mutable until the block ends: the trace asks the recorder. Then it holds the routes itself.
    trace = RoutingTrace(recorder.routes)
    try:
        with watched(modules, recorder):
            yield trace
    finally:
        trace.close()
        recorder.forget_caches()
    if not recorder.passes and recorder.missed:
        warnings.warn(
            "nothing was recorded: the model ran in another thread than the block. Start that "
            "thread with contextvars.copy_context().run, or record inside it. DataParallel runs "
            "copies of the model in threads of its own: record the model inside of it.",
            PatchlabWarning,
            stacklevel=3,
        )
