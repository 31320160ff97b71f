"""Constructors without what makes them slow: random numbers for weights that nobody will read."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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

    That takes most of the time of a constructor, and on the meta device, where it does nothing at
    all, a third. Constants are still filled in, and so is what is no larger than the tensors that
    are wanted: a view of one is smaller than it.
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
