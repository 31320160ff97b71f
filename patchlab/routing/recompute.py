"""Recompute: gradient checkpointing runs a layer twice, and both times with the same experts.

The second run happens in backward: layers in reverse order, possibly in a thread of autograd's,
possibly after the scope has ended or after another forward. Whatever lives in an attribute or in a
context variable is wrong by then, as an error or, worse, as a silently wrong gradient. So the
function handed to the checkpoint carries the experts of its first run along, and imposes them on
every later one. Recording alone does so too: scores that nearly tie must not tip in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from patchlab.routing.sites import RouterSite

# By `id` of the router: the site, and the experts of each of its calls in order.
_Routes = dict[int, tuple[RouterSite, list[torch.Tensor]]]
_Holds = Callable[[Iterable[RouterSite]], AbstractContextManager[None]]

# What the checkpointed functions that run for the first time in this context want to know,
# innermost last.
_REMEMBERING: ContextVar[tuple[_Routes, ...]] = ContextVar("patchlab_remembering", default=())
# What is left to impose on the function that is being recomputed in this context.
_AGAIN: ContextVar[_Routes | None] = ContextVar("patchlab_again", default=None)

_TRACKER = ModuleTracker()


def in_backward() -> bool:
    """Tell whether this thread is inside a backward pass."""
    return bool(_TRACKER.is_bw)


def remember(site: RouterSite, index: torch.Tensor) -> None:
    """Note the experts a router chose for the checkpointed functions around it."""
    for routes in _REMEMBERING.get():
        routes.setdefault(id(site.module), (site, []))[1].append(index.detach())


def recomputed(module: nn.Module) -> tuple[RouterSite, torch.Tensor] | None:
    """Return the experts a router had in the run that is being repeated; None if none is."""
    again = _AGAIN.get()
    if again is None or id(module) not in again:
        return None
    site, left = again[id(module)]
    return (site, left.pop(0)) if left else None


class Checkpointed:
    """A checkpoint function that lets what it checkpoints keep its experts.

    Args:
        own: The function it stands for, `torch.utils.checkpoint.checkpoint` with options.
        watched: Whether anybody watches routers in this context.
        holds: Gives routers their watched class for a block.
    """

    def __init__(self, own: Callable[..., Any], watched: Callable[[], bool], holds: _Holds) -> None:
        self.own = own
        self._watched = watched
        self._holds = holds

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint a function."""
        if self._watched() or _AGAIN.get() is not None:
            function = _SameExperts(function, self._holds)
        return self.own(function, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle of the model, made inside the scope, has the function itself.
        return itself, (self.own,)


def itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function: what a copy of something that stands in for it becomes."""
    return function


class _SameExperts:
    """A function whose later runs choose the experts of its first."""

    def __init__(self, function: Callable[..., Any], holds: _Holds) -> None:
        self._function = function
        self._holds = holds
        self._routes: _Routes | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._routes is None:
            return self._first(*args, **kwargs)
        if not self._routes:
            return self._function(*args, **kwargs)
        again = {key: (site, list(calls)) for key, (site, calls) in self._routes.items()}
        with self._holds(site for site, _ in again.values()):
            token = _AGAIN.set(again)
            try:
                return self._function(*args, **kwargs)
            finally:
                _AGAIN.reset(token)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        routes: _Routes = {}
        token = _REMEMBERING.set((*_REMEMBERING.get(), routes))
        try:
            return self._function(*args, **kwargs)
        finally:
            _REMEMBERING.reset(token)
            self._routes = routes
