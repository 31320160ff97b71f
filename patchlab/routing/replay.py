"""Replay: every forward inside a block sends its tokens to the experts of a trace.

What is imposed is which experts, and nothing else: their scores are gathered from the live router,
and normalizing, scaling, bias correction and gradients are the model's own code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from patchlab.errors import PatchlabWarning, RoutingError
from patchlab.plan.wording import listed
from patchlab.render.numbers import count
from patchlab.routing.align import Cursor
from patchlab.routing.attach import watched
from patchlab.routing.fit import fitted
from patchlab.routing.interop import trace_of_any
from patchlab.routing.passes import TokenPass
from patchlab.routing.sites import RouterSite, modules_of, routers_among
from patchlab.routing.trace import LIVE, Router, Routes, RoutingTrace
from patchlab.routing.watch import Watcher, none_ran


@dataclass(slots=True, eq=False)
class _Running:
    """A pass that has begun: its rows, on each device, and what is kept when it ends."""

    tokens: TokenPass
    rows: torch.Tensor
    has_live: bool
    after: Cursor
    by_device: dict[torch.device, torch.Tensor]
    calls: dict[str, int]
    ran: set[str] = field(default_factory=set)


class Replayer(Watcher):
    """Hands the experts of a trace to the routers of the passes it watches."""

    imposes = True

    def __init__(
        self, sites: Sequence[RouterSite], routers: dict[str, Router], routes: Routes, strict: bool
    ) -> None:
        super().__init__(sites)
        self._routers = routers
        self._routes = routes
        self._has_live = any(
            bool((index < 0).any()) for index in routes.indices.values() if index.dtype.is_signed
        )
        self._moved: dict[tuple[str, torch.device], torch.Tensor] = {}
        # One cursor for each model around routers; routers with tokens of their own count calls.
        self._keys = {site.owner: self._key(site) for site in sites}
        self._cursors = {
            owner: Cursor(routes.blocks[key], strict)
            for owner, key in self._keys.items()
            if key is not None
        }
        self._running: dict[str, _Running] = {}
        self._calls: dict[str, int] = {}
        self._ran: set[str] = set()
        # Models whose last pass was refused or failed: what that left unused is no news.
        self._failed: set[str] = set()

    def _key(self, site: RouterSite) -> str | None:
        """Return the token blocks that a model's routers share, None if each has its own."""
        shared = [
            self._routers[other.fqn].tokens
            for other in self.sites.values()
            if other.owner == site.owner and not self._has_own_tokens(other)
        ]
        return shared[0] if shared else None

    def _has_own_tokens(self, site: RouterSite) -> bool:
        router = self._routers[site.fqn]
        return router.tokens == router.fqn

    def begin_pass(self, owner: str, tokens: TokenPass) -> None:
        """Place the tokens of a pass in the trace, or refuse it."""
        self._failed.add(owner)
        if owner not in self._cursors:
            rows, after = torch.empty(0, dtype=torch.int64), Cursor(())
        else:
            rows, after = self._cursors[owner].place(tokens)
        has_live = self._has_live or bool((rows < 0).any())
        self._running[owner] = _Running(tokens, rows, has_live, after, {}, dict(self._calls))

    def end_pass(self, owner: str) -> None:
        """Go on to the next tokens."""
        running = self._running.pop(owner, None)
        if running is None:
            return
        if not running.ran:
            first = next(site for site in self.sites.values() if site.owner == owner)
            raise none_ran(first, running.tokens)
        if owner in self._cursors:
            self._cursors[owner] = running.after
        self._calls.update(running.calls)
        self._ran |= running.ran
        self._failed.discard(owner)

    def unused(self) -> tuple[str, ...]:
        """Say in phrases what of the trace was not imposed; empty if a failure was told before."""
        if self._failed:
            return ()
        if not self._ran:
            return ("all of it, since no forward of the model ran in the block",)
        found = [phrase for cursor in self._cursors.values() for phrase in cursor.unused()]
        for site in self.sites.values():
            router = self._routers[site.fqn]
            index = self._routes.indices[router.fqn]
            if self._has_own_tokens(site):
                recorded = len(self._routes.blocks[router.tokens])
                left = recorded - self._calls.get(site.fqn, 0)
                if left > 0:
                    found.append(f"{left} of {count(recorded, 'call')} of {site.fqn}")
            elif site.fqn not in self._ran and bool((index >= 0).any()):
                found.append(f"all routes of {site.fqn}, which did not run")
        return tuple(found)

    def forced(self, site: RouterSite, device: torch.device) -> tuple[torch.Tensor, bool] | None:
        """Return the experts of the pass's tokens for a router."""
        running = self._running.get(site.owner)
        if running is None:
            raise RoutingError(
                f"{site.fqn} runs, but no call of {type(site.owner_module).__name__} around it was "
                f"seen, so its tokens cannot be placed. Call the model itself, not a part of it or "
                f"its forward; if it is compiled, hand the compiled model to replay_routing, or "
                f"compile it inside the block."
            )
        fqn = self._routers[site.fqn].fqn
        index = self._on(fqn, device)
        if self._has_own_tokens(site):
            return self._next_call(site, running, index), self._has_live
        rows = running.by_device.get(device)
        if rows is None:
            rows = running.by_device[device] = running.rows.to(device)
        if not running.has_live:
            return index[rows].long(), False
        chosen = index[rows.clamp(min=0)].long()
        return chosen.masked_fill((rows < 0).unsqueeze(-1), LIVE), True

    def chosen(self, site: RouterSite, index: torch.Tensor) -> None:
        """Count a call of a router, also where a replay inside of this one decided it."""
        running = self._running.get(site.owner)
        if running is not None:
            running.ran.add(site.fqn)
            running.calls[site.fqn] = running.calls.get(site.fqn, 0) + 1

    def _next_call(self, site: RouterSite, running: _Running, index: torch.Tensor) -> torch.Tensor:
        router = self._routers[site.fqn]
        number = running.calls.get(site.fqn, 0)
        blocks = self._routes.blocks[router.tokens]
        if number >= len(blocks):
            raise RoutingError(
                f"{site.fqn} runs once more than was recorded: the trace has "
                f"{count(len(blocks), 'call')} of it. It gets only some of the tokens, so forwards "
                f"must follow one another as in the recording."
            )
        start = sum(block.num_tokens for block in blocks[:number])
        return index[start : start + blocks[number].num_tokens].long()

    def _on(self, fqn: str, device: torch.device) -> torch.Tensor:
        key = (fqn, device)
        if key not in self._moved:
            self._moved[key] = self._routes.indices[fqn].to(device)
        return self._moved[key]


@contextmanager
def replay_routing(
    model: nn.Module, trace: RoutingTrace | Any, *, strict: bool = False
) -> Iterator[RoutingTrace]:
    """Send the tokens of every forward inside a block to the experts of a trace.

    Forwards take the sequences of the trace in order, each as many as its batch has; padding may be
    elsewhere, and sequences may be packed into one row with `position_ids` that start at 0. Over a
    cache that is handed in, each forward takes the next tokens. A sequence may be one token longer
    than its trace: the last token of a generation was never run, and is routed live. Tokens whose
    entry is below 0 are routed live too. Routes that are left over when the block ends are told of:
    the forwards did not go where the recording went.

    Args:
        model: The model, with or without its head; it need not be the one that was recorded, nor
            have its weights.
        trace: A trace; also a list of tensors as `RoutingTrace.to_list` gives it, or an array as
            `RoutingTrace.from_vllm` takes it.
        strict: Refuse tokens without a route instead of routing them live, and routes that are left
            over instead of warning of them.

    Yields:
        The trace, with the model's own names of its routers.

    Raises:
        RoutingError: The trace is not of this model: other routers, number of experts, top-k or
            family. Later, before a forward runs: its tokens do not fit the trace. With `strict`,
            when the block ends and no error is under way: routes are left over.

    Example:
        with replay_routing(model, trace):
            loss = model(input_ids=sequences, labels=labels).loss
        loss.backward()
    """
    modules = modules_of(model)
    sites = routers_among(modules, side_towers=True)
    if not isinstance(trace, RoutingTrace):
        trace = trace_of_any(model, trace)
    sites, routers = fitted(model, sites, trace)
    routes = trace.routes
    replayer = Replayer(sites, routers, routes, strict)
    names = {router.fqn: fqn for fqn, router in routers.items()}
    with watched(modules, replayer):
        yield RoutingTrace(_renamed(routes, names))
    # Only a block that ended without an error comes here.
    _check_used(replayer, strict=strict)


def _check_used(replayer: Replayer, *, strict: bool) -> None:
    unused = replayer.unused()
    if not unused:
        return
    where = (
        "The model ran in another thread than the block; start that thread with "
        "contextvars.copy_context().run, or replay inside it. DataParallel runs copies of the "
        "model in threads of its own: call the model inside of it."
        if replayer.missed
        else "The forwards did not go where the recording went. To impose a part of a trace, hand "
        "in that part, such as trace.sequence(0)."
    )
    message = f"routes of the trace were not used: {listed(unused)}. {where}"
    if strict:
        raise RoutingError(message)
    # Past this function, the generator, and contextlib: the line that left the block.
    warnings.warn(message, PatchlabWarning, stacklevel=4)


def _renamed(routes: Routes, names: dict[str, str]) -> Routes:
    if all(old == new for old, new in names.items()):
        return routes
    return replace(
        routes,
        routers=tuple(
            replace(router, fqn=names[router.fqn], tokens=names.get(router.tokens, router.tokens))
            for router in routes.routers
        ),
        indices={names[fqn]: index for fqn, index in routes.indices.items()},
        blocks={names.get(key, key): blocks for key, blocks in routes.blocks.items()},
    )
