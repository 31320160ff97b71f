"""Attachment: how the routers of a live model come to be watched, and how all of it is put back.

Routers get their watched class, the models around them two hooks, checkpointed layers a function
that carries routes along, and `generate` a refusal of beam search, each for as long as anybody
holds it. Recording and replay may be nested and may overlap in any order, on one model or on parts
of it, in one thread or in several: the last to let go puts each thing back. Everything is put back
whichever instruction an error or an interrupt hits, since what is to be undone is written down
before it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patchlab._upstream import (
    beam_reorder,
    checkpoint_function,
    checkpointing_modules,
    restore_beam_reorder,
    set_beam_reorder,
    set_checkpoint_function,
)
from patchlab.errors import RoutingError
from patchlab.routing.recompute import Checkpointed, itself
from patchlab.routing.sites import RouterSite
from patchlab.routing.watch import (
    PassHook,
    Watcher,
    keep_from_compiler,
    routed_class,
    run_router,
    stop,
    watch,
    watchers,
)


class _Held:
    """A change of a model that is there as long as somebody holds it."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo
        self.done = False
        self.holders: set[object] = set()


_LOCK = threading.RLock()
_HELD: dict[tuple[str, int], _Held] = {}


def _hold(
    key: tuple[str, int], holder: object, do: Callable[[], None], undo: Callable[[], None]
) -> None:
    # Written down first, done second: whatever interrupts, the release finds it. Both can be
    # repeated, and undoing what was not done does nothing.
    held = _HELD.setdefault(key, _Held(undo))
    held.holders.add(holder)
    if not held.done:
        do()
        held.done = True


def _release(holder: object) -> None:
    with _LOCK:
        for key, held in list(_HELD.items()):
            if held.holders <= {holder}:
                held.undo()
                del _HELD[key]
            else:
                held.holders.discard(holder)


def _hold_router(module: nn.Module, holder: object) -> None:
    key = ("router", id(module))
    if key in _HELD:
        _HELD[key].holders.add(holder)
        return
    if "forward" in vars(module):
        _hold_forward(module, holder)
        return
    own = type(module)
    routed = routed_class(own)

    # Past the module's own __setattr__, which looks through parameters and buffers first.
    def do() -> None:
        object.__setattr__(module, "__class__", routed)

    def undo() -> None:
        if type(module) is routed:
            object.__setattr__(module, "__class__", own)

    _hold(key, holder, do, undo)


class _PlacedForward:
    """A forward on the instance, watched; a copy of it, made with the model, is the forward itself.

    accelerate puts one on the modules that it offloads, before which no class's is asked.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any]) -> None:
        self._module = module
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_router(self._module, self._own, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return itself, (self._own,)


def _hold_forward(module: nn.Module, holder: object) -> None:
    own = vars(module)["forward"]
    forward = _PlacedForward(module, own)

    def do() -> None:
        vars(module)["forward"] = forward

    def undo() -> None:
        if vars(module).get("forward") is forward:
            vars(module)["forward"] = own

    _hold(("router", id(module)), holder, do, undo)


def _hold_hooks(model: nn.Module, holder: object) -> None:
    handles: list[Any] = []

    def do() -> None:
        handles.append(model.register_forward_pre_hook(PassHook(begins=True), with_kwargs=True))
        handles.append(model.register_forward_hook(PassHook(begins=False)))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        # Nothing is left here, unless an interrupt came between a registration and its handle.
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(hook, PassHook):
                    del hooks[number]
                    model._forward_pre_hooks_with_kwargs.pop(number, None)

    _hold(("hooks", id(model)), holder, do, undo)


def _hold_checkpoint(module: nn.Module, holder: object) -> None:
    own = checkpoint_function(module)
    if own is None or isinstance(own, Checkpointed):
        held = _HELD.get(("checkpoint", id(module)))
        if held is not None:
            held.holders.add(holder)
        return
    bound = Checkpointed(own, lambda: bool(watchers()), _routers_held)

    def do() -> None:
        set_checkpoint_function(module, bound)

    def undo() -> None:
        if checkpoint_function(module) is bound:
            set_checkpoint_function(module, own)

    # Enabled anew inside the scope: the entry is that of a function that is there no more.
    _HELD.pop(("checkpoint", id(module)), None)
    _hold(("checkpoint", id(module)), holder, do, undo)


class _BeamReorder:
    """Refuses beam search while routing is watched; does what was done before otherwise."""

    def __init__(self, own: Callable[..., Any] | None) -> None:
        self._own = own

    def __call__(self, cache: Any, beam_idx: torch.Tensor) -> Any:
        if watchers():
            raise RoutingError(
                "beam search reorders the sequences of the cache after each token, and the routes "
                "recorded or imposed so far would belong to other sequences. Generate with "
                "num_beams=1 inside record_routing or replay_routing."
            )
        if self._own is not None:
            return self._own(cache, beam_idx)
        cache.reorder_cache(beam_idx)
        return cache


def _hold_beams(model: nn.Module, holder: object) -> None:
    refusal = _BeamReorder(beam_reorder(model))
    _hold(
        ("beams", id(model)),
        holder,
        lambda: set_beam_reorder(model, refusal),
        lambda: restore_beam_reorder(model, refusal),
    )


@contextmanager
def _routers_held(sites: Iterable[RouterSite]) -> Iterator[None]:
    """Let routers have their watched class in a block, for a recompute after the scope."""
    holder = object()
    try:
        with _LOCK:
            for site in sites:
                _hold_router(site.module, holder)
        yield
    finally:
        _release(holder)


@contextmanager
def watched(modules: Mapping[str, nn.Module], watcher: Watcher) -> Iterator[None]:
    """Let a watcher see, in this context, what the routers of a model do inside a block.

    `modules` are all those of the model, as `named_modules` gives them.

    Blocks may be nested and may overlap in any order, in one thread or in several. When the last
    one ends, however it ends, the model is what it was before the first.
    """
    keep_from_compiler()
    _refuse_compiled_in_place(modules)
    layers = tuple(checkpointing_modules(modules.values()))
    classes = {type(module) for module in modules.values()}
    generating = {cls for cls in classes if hasattr(cls, "generate")}

    def bind_checkpoints() -> None:
        with _LOCK:
            for layer in layers:
                _hold_checkpoint(layer, watcher)

    watcher.bind_checkpoints = bind_checkpoints
    try:
        with _LOCK:
            for module in modules.values():
                if type(module) in generating:
                    _hold_beams(module, watcher)
            bind_checkpoints()
            for site in watcher.sites.values():
                _hold_hooks(site.owner_module, watcher)
                _hold_router(site.module, watcher)
        watch(watcher)
        yield
    finally:
        try:
            _leave(watcher)
        except BaseException:
            _leave(watcher)  # Interrupted on the way out: every step can be repeated.
            raise


def _refuse_compiled_in_place(modules: Mapping[str, nn.Module]) -> None:
    for fqn, module in modules.items():
        if vars(module).get("_compiled_call_impl") is not None:
            raise RoutingError(
                f"{fqn or type(module).__name__} was compiled in place by module.compile(), whose "
                f"code does not announce its passes. Hand torch.compile(model) to record_routing "
                f"or replay_routing and call that, or compile after the block."
            )


def _leave(watcher: Watcher) -> None:
    stop(watcher)
    _release(watcher)
