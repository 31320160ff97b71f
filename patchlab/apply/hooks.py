"""The hook that brings patches into `from_pretrained` and `from_config`.

transformers enters patches through two names in `modeling_utils`. While somebody needs it (a scope
is open, something is registered through patchlab, the notebook extension is loaded) these names
lead to the functions below; otherwise transformers' own functions stand there. Importing patchlab
binds nothing.

The public functions of the registry are reached through this file, so that whoever registers also
gets the hook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from patchlab._upstream import BUILD_NAMES, modeling_utils, own_build_function
from patchlab.apply.construct import Frame, close_frame, open_frame, open_frames
from patchlab.apply.initializers import bind_initializers
from patchlab.apply.telling import note_build, warn_of_build
from patchlab.mapping.registry import (
    Change,
    clear_patch_mapping,
    follow,
    get_patch_mapping,
    has_own_entries,
    register_patch_mapping,
    registered_mapping,
    unregister_patch_mapping,
)

__all__ = [
    "clear_patch_mapping",
    "get_patch_mapping",
    "hold",
    "hook_stands",
    "register_patch_mapping",
    "release",
    "unregister_patch_mapping",
    "without_registered",
]

LOCK = threading.RLock()
_holders: set[Hashable] = set()
_without_registered: ContextVar[bool] = ContextVar("patchlab_without_registered", default=False)


def hold(holder: Hashable) -> None:
    """Keep the hook in place until `release` is called with the same holder; twice is once."""
    with LOCK:
        _holders.add(holder)
        _bind()


def release(holder: Hashable) -> None:
    """Give back a `hold`; the hook goes when nothing needs it. One too many does no harm."""
    with LOCK:
        _holders.discard(holder)
        _bind()


def hook_stands() -> bool:
    """Tell whether `from_pretrained` and `from_config` go through patchlab now."""
    module = modeling_utils()
    return all(getattr(module, name) is _OURS[name] for name in BUILD_NAMES)


def _follow_registry(change: Change) -> None:
    with LOCK:
        _bind()


def _bind() -> None:
    wanted = bool(_holders) or has_own_entries()
    module = modeling_utils()
    bind_initializers(wanted)
    for name in BUILD_NAMES:
        current, own = getattr(module, name), own_build_function(name)
        # Compare before putting back: a third party's hook on top of either is left alone.
        if wanted and current is own:
            setattr(module, name, _OURS[name])
        elif not wanted and current is _OURS[name]:
            setattr(module, name, own)


@contextmanager
def without_registered() -> Iterator[None]:
    """Build inside the block under the open scopes alone, whatever is registered, and by whom.

    A model with sub-models calls `from_config` for each from its constructor, so leaving
    `from_config` out at the top is not enough.
    """
    holder = object()
    token = _without_registered.set(True)
    try:
        hold(holder)
        yield
    finally:
        _without_registered.reset(token)
        release(holder)


@contextmanager
def _build_context() -> Iterator[None]:
    """Stand in for `apply_patches` around one build: the registered rules, if not on yet.

    A vision-language model calls this once more for each sub-model.
    """
    mapping = registered_mapping()
    if (
        not len(mapping)
        or _without_registered.get()
        or any(
            frame.registered and frame.mapping.to_dict() == mapping.to_dict()
            for frame in open_frames()
        )
    ):
        yield
        return
    frame = Frame(mapping, registered=True)
    # Around the open scopes: what a scope asks for comes before what is registered.
    open_frame(frame, outermost=True)
    try:
        yield
    except Exception as error:
        close_frame(frame)
        note_build(error, frame)
        raise
    finally:
        close_frame(frame)
    # A scope tells what it has replaced itself, and a sub-model's build comes through above.
    warn_of_build(frame)


def _built(model: nn.Module) -> None:
    """Stand in for `patch_output_recorders`: models built under a scope have theirs already."""


_OURS: dict[str, Callable[..., Any]] = {
    "apply_patches": _build_context,
    "patch_output_recorders": _built,
}
follow(_follow_registry)
