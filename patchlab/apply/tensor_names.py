"""The parts and tensors of a module with their names, also where a module holds itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def tensors_at(module: nn.Module, *, saved: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and buffer under every name it has, also in a module with a cycle.

    Args:
        module: The module.
        saved: Leave out buffers that are not persistent.
    """
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", module, frozenset())]
    while stack:
        prefix, part, above = stack.pop()
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and not (saved and name in part._non_persistent_buffers_set):
                yield prefix + name, buffer
        if not part._modules:
            continue
        inside = above | {id(part)}
        for name, child in reversed(list(part._modules.items())):
            if child is not None and id(child) not in inside:
                stack.append((f"{prefix}{name}.", child, inside))


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return path → module, as `named_modules` yields them, in a fraction of its time."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        path, part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found[path] = part
        if part._modules:
            prefix = f"{path}." if path else ""
            for name, child in reversed(list(part._modules.items())):
                if child is not None:
                    stack.append((prefix + name, child))
    return found


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a state dict holds, the very tensors, also of a module with a cycle."""
    return dict(tensors_at(module, saved=True))


def joined(prefix: str, name: str) -> str:
    """Return the name below a prefix, either of which may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
