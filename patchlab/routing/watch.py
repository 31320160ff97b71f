"""Watching: what a router and the model around it do while somebody records or imposes routes.

A watched router has a subclass of its class, whose `forward` asks who watches *in this context*;
the model around it has two hooks that announce each pass. Nobody watching in this context (another
thread, another task) means the original's own `forward`, untouched.

`forward` and not `__call__` is what is watched: hooks on a router, which may well take a `topk` of
its scores, are no part of its choice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from patchlab.errors import RoutingError
from patchlab.routing.passes import TokenPass, read_pass
from patchlab.routing.recompute import in_backward, recomputed, remember
from patchlab.routing.selection import Selection, chosen_in_output, no_choice
from patchlab.routing.sites import RouterSite


def _nothing(*args: Any) -> None:
    """Do nothing: in place of a hook that was copied with its model, for one."""


class Watcher:
    """Somebody who watches the routers of a model: a recorder or a replayer.

    Attributes:
        sites: The routers watched, by `id` of their module; the sites keep the modules alive.
        is_open: False once the scope has ended. A context that outlives the scope (a task, an async
            cell) still finds the watcher and must leave it alone.
        bind_checkpoints: Lets checkpointed layers keep their experts; called at each pass that may
            be differentiated.
        missed: Calls of its routers in contexts where it does not watch, such as another thread.
        imposes: Whether it chooses experts. Then passes also say where packed sequences start.
    """

    imposes = False

    def __init__(self, sites: Iterable[RouterSite]) -> None:
        self.sites = {id(site.module): site for site in sites}
        self.owners = {id(site.owner_module): site.owner for site in self.sites.values()}
        self.bind_checkpoints: Callable[[], None] = _nothing
        self.is_open = True
        self.missed = 0

    def begin_pass(self, owner: str, tokens: TokenPass) -> None:
        """Hear that a model starts a pass; raise to refuse it."""

    def end_pass(self, owner: str) -> None:
        """Hear that the pass has come to its end. One that fails never does."""

    def forced(self, site: RouterSite, device: torch.device) -> tuple[torch.Tensor, bool] | None:
        """Return the experts to choose and whether some of them are live; None to leave it."""

    def chosen(self, site: RouterSite, index: torch.Tensor) -> None:
        """Hear which experts a router chose."""


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("patchlab_routing", default=())


# All open watchers, in whatever context.
_OPEN: set[Watcher] = set()


def watch(watcher: Watcher) -> None:
    """Let a watcher watch in this context, for as long as it is open."""
    _OPEN.add(watcher)
    _WATCHERS.set((*watchers(), watcher))


def stop(watcher: Watcher) -> None:
    """Close a watcher: it hears of nothing any more, in no context."""
    watcher.is_open = False
    _OPEN.discard(watcher)
    _WATCHERS.set(watchers())


def watchers() -> tuple[Watcher, ...]:
    """Return who watches in this context, outermost first."""
    return tuple(watcher for watcher in _WATCHERS.get() if watcher.is_open)


# --- the routers' subclass ------------------------------------------------------------------------

# Weak on both sides: a subclass keeps its base, and a class in a notebook should be able to die.
_ROUTED: weakref.WeakKeyDictionary[type, weakref.ref[type[nn.Module]]] = weakref.WeakKeyDictionary()
# A dict on the subclass: where in its output the very tensor of the choice was, by `training`.
_PLACES = "_patchlab_places"


def routed_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that a router of this class has while it is watched."""
    known = _ROUTED[original]() if original in _ROUTED else None
    if known is not None:
        return known
    disable: Callable[..., Any] = torch.compiler.disable
    # The choice is looked at operation by operation, which compiled code does not have.
    own = disable(original.forward, reason=_REASON)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_router(self, own.__get__(self), args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # A copy or a pickle made inside the scope is one of the original class.
        reduced: Any = super(routed, self).__reduce_ex__(protocol)
        if isinstance(reduced, str) or reduced[0].__name__ != "__newobj__":
            return reduced
        # Not the `__newobj__` of before: pickle wants that to make the class that it is given.
        return object.__new__, (original,), *reduced[2:]

    body = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        _PLACES: {},
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    # The same name: `str(type(router))`, which transformers keys things by, stays what it was.
    routed: type[nn.Module] = type(original.__name__, (original,), body)
    _ROUTED[original] = weakref.ref(routed)
    return routed


class _Uncompiled:
    """What must not be compiled: it reads context variables and looks at each operation."""

    run: Callable[..., Any]
    announce: Callable[..., Any]


_UNCOMPILED = _Uncompiled()
_REASON = "patchlab watches the routers; compile with fullgraph=False, or outside the scope"


def keep_from_compiler() -> None:
    """Make the functions that a compiled model calls as they are; needed before anything runs."""
    if hasattr(_UNCOMPILED, "announce"):
        return
    # Here and not above: it imports all of dynamo, which importing a model does anyway.
    disable: Callable[..., Any] = torch.compiler.disable
    _UNCOMPILED.run = disable(_run, reason=_REASON)
    _UNCOMPILED.announce = disable(_announce, reason=_REASON)


def run_router(
    module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a router's own forward, for whoever watches it in this context."""
    # Not only while compiling: what a graph break leaves to run is compiled frame by frame.
    return _UNCOMPILED.run(module, own, args, kwargs)


def _run(
    module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    again = recomputed(module)
    if again is not None:
        site, index = again
        remember(site, index)
        with Selection(site, index):
            return own(*args, **kwargs)
    key = id(module)
    watching = [watcher for watcher in watchers() if key in watcher.sites]
    if not watching:
        still_open = tuple(_OPEN)
        # Nobody's site, and yet of a watched class: a replica, as DataParallel makes for a thread.
        replica = not any(key in watcher.sites for watcher in still_open)
        for watcher in still_open:
            watcher.missed += replica or key in watcher.sites
        return own(*args, **kwargs)
    site = watching[-1].sites[key]
    unbound = torch.is_grad_enabled() and in_backward()
    if unbound:
        if any(watcher.imposes for watcher in watching):
            raise _unbound(site)
        with Selection(site):
            return own(*args, **kwargs)

    # Each by its own site: one may watch the whole model, another a part under other names.
    forced = None
    for watcher in reversed(watching):
        if watcher.imposes and forced is None:
            forced = watcher.forced(watcher.sites[key], _device(args, kwargs))
    places: dict[bool, int] = getattr(type(module), _PLACES, {})
    place = places.get(module.training)
    if forced is None and place is not None and not torch.is_grad_enabled():
        # Nothing to impose and no graph to keep equal: take the choice from where it was found
        # before. Watching every operation costs 20 µs for each layer, this costs 2.
        output = own(*args, **kwargs)
        index = output[place]
    else:
        if forced is None:
            selection = Selection(site)
        else:
            selection = Selection(site, forced[0], partial=forced[1])
        with selection:
            output = own(*args, **kwargs)
        index = _chosen(module, site, selection, output, is_forced=forced is not None)
    remember(site, index)
    for watcher in watching:
        watcher.chosen(watcher.sites[key], index)
    return output


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    # Of what is routed and not of the weights, which accelerate may keep elsewhere until they run.
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _chosen(
    module: nn.Module, site: RouterSite, selection: Selection, output: Any, *, is_forced: bool
) -> torch.Tensor:
    if selection.chosen is not None:
        if isinstance(output, tuple):
            _note_place(module, output, selection.chosen)
        return selection.chosen
    index = None if is_forced else chosen_in_output(site, output)
    if index is None:
        raise no_choice(site)
    return index


def _note_place(module: nn.Module, output: tuple[Any, ...], index: torch.Tensor) -> None:
    for place, part in enumerate(output):
        if part is index:
            getattr(type(module), _PLACES, {})[module.training] = place


def _unbound(site: RouterSite) -> RoutingError:
    return RoutingError(
        f"{site.fqn} is recomputed for backward by a checkpoint that routing knows nothing of, so "
        f"the experts of its forward cannot be imposed. Use model.gradient_checkpointing_enable() "
        f"before the scope, or leave routing out of what is checkpointed."
    )


def none_ran(first: RouterSite, tokens: TokenPass) -> RoutingError:
    """Build the error for a pass of a model in which none of its routers ran."""
    return RoutingError(
        f"none of the routers of {type(first.owner_module).__name__} ran in its forward "
        f"of {tokens}, the first being {first.fqn}. A kernel or a patch has probably "
        f"replaced the block around them; load the model without it."
    )


# --- the models' hooks ----------------------------------------------------------------------------


class PassHook:
    """Announces the passes of one model; a copy of it, made with the model, does nothing."""

    def __init__(self, *, begins: bool) -> None:
        self._begins = begins

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Take a call of the model, as `register_forward_pre_hook` and the like give it."""
        _UNCOMPILED.announce(module, args, self._begins)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _announce(module: nn.Module, args: tuple[Any, ...], begins: bool) -> None:
    key = id(module)
    watching = [watcher for watcher in watchers() if key in watcher.owners]
    if not watching or (torch.is_grad_enabled() and in_backward()):
        return
    if not begins:
        for watcher in watching:
            watcher.end_pass(watcher.owners[key])
        return
    packed = any(watcher.imposes for watcher in watching)
    tokens = read_pass(module, args[0], args[1], packed=packed)
    if tokens is None:
        raise RoutingError(
            f"{type(module).__name__} was called without input_ids or inputs_embeds, so it cannot "
            f"be told which tokens its routers see. Call it with one of them, by name."
        )
    if torch.is_grad_enabled():
        for watcher in watching:
            watcher.bind_checkpoints()  # They may have been enabled inside the scope.
    for watcher in watching:
        watcher.begin_pass(watcher.owners[key], tokens)
