"""Calling constructors for a look at a structure, or for the constants they compute.

Both are wanted without what makes a constructor slow, random numbers for weights that come from
elsewhere, and outside of whatever scopes are open around the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from patchlab.apply.construct import Frame, close_frame, open_frame
from patchlab.model.skeleton import without_scopes

T = TypeVar("T")

_RANDOM = frozenset(
    [
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
        torch.nn.init.kaiming_normal_,
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.normal_,
        torch.nn.init.uniform_,
    ]
)


class WithoutRandomInit(TorchFunctionMode):
    """Skips filling large tensors with random numbers, in this thread alone.

    That takes most of the time of a constructor. Constants are still filled in, and so is what is
    no larger than the tensors that are wanted: a view of one is smaller than it.
    """

    def __init__(self, largest: int = -1) -> None:
        """Skip tensors of more than `largest` elements; by default all."""
        super().__init__()
        self.largest = largest

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            # The functions of `torch.nn.init` hand their tensor on by name.
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.numel() > self.largest:
                return tensor
        return func(*args, **kwargs)


def under(frame: Frame, function: Callable[[], T]) -> T:
    """Call a function outside of every scope but with one frame open, and close that for certain.

    The second `close_frame` is for an interrupt at the very line of the first.
    """

    def call() -> T:
        try:
            try:
                open_frame(frame)
                return function()
            finally:
                close_frame(frame)
        except BaseException:
            close_frame(frame)
            raise

    return without_scopes(call)
