"""Which tensors a load would initialize, and which it would leave as uninitialized memory.

`from_pretrained` builds on the meta device. What the checkpoint lacks becomes uninitialized memory,
and then `_init_weights` of the model runs on each module; that knows the classes of the model's own
file and torch's, and nothing of a replacement's own parameters. The report says "newly initialized"
in any case. So the initialization is run on the skeleton, where it costs nothing, and noted is
which tensors it writes to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab._upstream import initialize_module, pretrained_model_class
from patchlab.apply.initializers import initializer_of
from patchlab.apply.uninitialized import Writes


@dataclass(frozen=True, slots=True)
class Initialized:
    """What initialization writes to.

    Attributes:
        by_model: Names that the model's `_init_weights` writes to.
        by_own: Names that a replacement's `init_new_weights` writes to.
        raised: FQN → the error of an initialization that raises.
    """

    by_model: frozenset[str]
    by_own: frozenset[str]
    raised: dict[str, str]


def find_initialized(model: nn.Module, fqns: Iterable[str]) -> Initialized:
    """Find the tensors that an initialization writes to, below some modules.

    Args:
        model: A skeleton on the meta device; its tensors hold nothing, so nothing is changed.
        fqns: The modules to look at, with all below them.
    """
    by_model: set[str] = set()
    by_own: set[str] = set()
    raised: dict[str, str] = {}
    for fqn, module in _below(model, fqns):
        prefix = f"{fqn}." if fqn else ""
        owner = _model_of(model, fqn)
        ways: list[tuple[Callable[[], Any], set[str]]] = [
            (functools.partial(initialize_module, owner, module), by_model)
        ]
        method = initializer_of(module)
        if method is not None:
            ways.append((method, by_own))
        for initialize, written in ways:
            # A replacement's method may write to its submodules' tensors too.
            reach = module.named_modules() if written is by_own else [("", module)]
            tensors = {
                f"{prefix}{path}.{name}" if path else prefix + name: tensor
                for path, part in reach
                for name, tensor in [*part._parameters.items(), *part._buffers.items()]
                if tensor is not None
            }
            if not tensors:
                continue
            writes = Writes()
            try:
                with torch.no_grad(), _unmarked(tensors.values()), writes:
                    initialize()
            except Exception as error:  # noqa: BLE001  (the model's code on a foreign class)
                raised[fqn] = f"{type(error).__name__}: {error}"
            for name, tensor in tensors.items():
                if tensor.untyped_storage()._cdata in writes.storages:
                    written.add(name)
    return Initialized(frozenset(by_model), frozenset(by_own), raised)


def constants_of(model: nn.Module, fqns: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the non-persistent buffers, and the plain tensors left on the meta device."""
    buffers, plain = [], []
    for fqn, module in _below(model, fqns):
        prefix = f"{fqn}." if fqn else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                buffers.append(prefix + name)
        for name, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(v, torch.Tensor) and v.device.type == "meta" for v in items):
                plain.append(prefix + name)
    return tuple(buffers), tuple(plain)


def _below(model: nn.Module, fqns: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for fqn in fqns:
        for name, module in model.get_submodule(fqn).named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield (f"{fqn}.{name}" if fqn and name else fqn or name), module


def _model_of(model: nn.Module, fqn: str) -> nn.Module:
    """Return the innermost model of transformers that a module belongs to."""
    found, here = model, model
    for name in fqn.split(".") if fqn else ():
        here = here._modules[name]  # type: ignore[assignment]
        if isinstance(here, pretrained_model_class()):
            found = here
    return found


@contextmanager
def _unmarked(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take off the mark of tensors that are initialized already, which stops `initialization`."""
    marked = [tensor for tensor in tensors if getattr(tensor, "_is_hf_initialized", False)]
    for tensor in marked:
        del tensor._is_hf_initialized  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in marked:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
