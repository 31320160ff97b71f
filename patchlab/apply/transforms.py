"""Weight transforms carried out by hand: checkpoint tensors to a model's, and back.

`from_pretrained` pushes the keys of a checkpoint through renamings and converters
(`core_model_loading.py`, transformers 5.24.0) while it loads. A swap needs the same on tensors that
are in memory, and a check of a checkpoint on tensors that are not there at all: the operations run
on meta tensors too, and give the shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab._upstream import is_converter, rename_checkpoint_key


@dataclass(frozen=True, eq=False, slots=True)
class Made:
    """A tensor of the model, with what it was made from.

    Attributes:
        tensor: The very tensor of the checkpoint where it was only renamed.
        sources: The keys of the checkpoint.
        converter: The `WeightConverter` that made it, None for a renaming.
    """

    tensor: torch.Tensor
    sources: tuple[str, ...]
    converter: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Carried:
    """What became of the tensors of a checkpoint.

    Attributes:
        made: Key in the model → tensor.
        unexpected: Keys of the checkpoint with no place in the model → the name they came to.
        failed: Key in the model whose converter raised → the error.
    """

    made: dict[str, Made]
    unexpected: dict[str, str]
    failed: dict[str, Exception]


@dataclass(slots=True)
class _Group:
    """Tensors that one converter makes one set of tensors from."""

    converter: Any
    tensors: dict[str, list[torch.Tensor]]
    sources: list[str]


def split_transforms(transforms: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the renamings and the converters, each in order."""
    renamings: list[Any] = []
    converters: list[Any] = []
    for transform in transforms:
        (converters if is_converter(transform) else renamings).append(transform)
    return renamings, converters


def carry_forward(
    tensors: Mapping[str, torch.Tensor],
    transforms: Iterable[Any],
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
) -> Carried:
    """Make a model's tensors from those of a checkpoint, as `from_pretrained` does.

    Args:
        tensors: Key in the checkpoint → tensor; may be on the meta device.
        transforms: Renamings and converters, in order.
        model: The model or its skeleton, which operations may ask for shapes and config.
        state: The names that the model has, its state dict.

    Returns:
        What was made, and what was not. An operation that raises is noted and stops nothing.
    """
    renamings, converters = split_transforms(transforms)
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    made: dict[str, Made] = {}
    unexpected: dict[str, str] = {}
    groups: dict[str, _Group] = {}
    # In the order of transformers: experts are stacked in the order in which their keys come.
    for key in sorted(tensors, key=natural_key):
        name, pattern = rename_checkpoint_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_checkpoint_key(key, [], [], prefix, state)
        if name not in state:
            unexpected[key] = name
        elif pattern is None:
            made.setdefault(name, Made(tensors[key], (key,)))
        else:
            group = groups.get(name)
            if group is None:
                group = groups[name] = _Group(copy.deepcopy(by_pattern[pattern]), {}, [])
            group.tensors.setdefault(pattern, []).append(tensors[key])
            group.sources.append(key)
    failed: dict[str, Exception] = {}
    for name, group in groups.items():
        sources = tuple(group.sources)
        try:
            results = run_converter(group.converter, name, group.tensors, model)
        except Exception as error:  # noqa: BLE001  (users' operations; noted, and told by callers)
            failed[name] = error
            continue
        for target, tensor in results.items():
            if target in state:
                made[target] = Made(tensor, sources, group.converter)
            else:
                # A load asks the model for such a name, and raises.
                failed[target] = LookupError(f"it also makes {target!r}, which the model has not")
    return Carried(made, unexpected, failed)


def run_converter(
    converter: Any, name: str, tensors: Mapping[str, list[torch.Tensor]], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Run the operations of one converter; the names are those of the model.

    Args:
        converter: A `WeightConverter` of its own for this call: it holds the tensors meanwhile.
        name: The name that its keys were renamed to.
        tensors: Source pattern → tensors, in order.
        model: What operations may ask for shapes and config.
    """
    for pattern, items in tensors.items():
        converter.collected_tensors[pattern] = list(items)
    with torch.no_grad():
        results = converter.convert(name, model=model, config=getattr(model, "config", None))
    return {
        target: tensor[0] if isinstance(tensor, list) else tensor
        for target, tensor in results.items()
    }


def signature(transform: Any) -> tuple[Any, ...]:
    """Return what two transforms that do the same have in common."""
    operations = getattr(transform, "operations", ())
    return (
        type(transform),
        tuple(transform.source_patterns),
        tuple(transform.target_patterns),
        tuple((type(operation), str(sorted(vars(operation).items()))) for operation in operations),
        getattr(transform, "scope_prefix", None),
    )


def natural_key(name: str) -> list[tuple[int, str, int]]:
    """Sort names with their numbers as numbers, part by part."""
    parts = []
    for part in name.split("."):
        if part.isdigit():
            parts.append((0, "", int(part)))
        else:
            text = part.rstrip("0123456789")
            digits = part[len(text) :]
            parts.append((1, text, int(digits) if digits else -1))
    return parts
