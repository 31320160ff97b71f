"""Whether conversions reverse: what they make of a checkpoint, turned back, must be the checkpoint.

`save_pretrained` reverses the conversions that a model was loaded with. One that does not reverse
loads right and then saves a corrupt checkpoint, without a word. So each is run forward and back on
random tensors of the real shapes, before it matters.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab._upstream import rename_checkpoint_key
from patchlab.apply.transforms import run_converter, split_transforms
from patchlab.verify.checkpoint_files import StoredTensor
from patchlab.verify.checkpoint_keys import Loading, meta_tensor

# Above this many elements (64 MB) the last dimension is cut to 2, since it costs as much memory as
# the layer has; conversions work along the others, with few exceptions.
_FULL = 1 << 24


@dataclass(frozen=True, slots=True)
class Reversal:
    """One converter, run forward and back.

    Attributes:
        sources: Its source patterns.
        targets: Its target patterns.
        operations: The names of its operations.
        problem: What came back wrong, "" if all came back as it was.
        checked: Whether values were compared; else only shapes.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[str, ...]
    problem: str
    checked: bool = True

    @property
    def ok(self) -> bool:
        """Whether a save gives back what was loaded."""
        return not self.problem

    @property
    def name(self) -> str:
        """The converter in a line."""
        return f"{', '.join(self.sources)} → {', '.join(self.targets)}"


def check_reversals(
    model: nn.Module,
    tensors: Mapping[str, StoredTensor],
    loading: Loading,
    transforms: list[Any],
) -> list[tuple[Any, Reversal]]:
    """Run each converter that a load uses forward and back, once for each different set of shapes.

    Args:
        model: The patched skeleton.
        tensors: What the checkpoint's headers say.
        loading: What the load would do.
        transforms: Renamings and converters, as the load would use them.

    Returns:
        Each converter with its result; the first problem of each.
    """
    renamings, converters = split_transforms(transforms)
    groups: dict[tuple[Any, ...], tuple[Any, str, tuple[str, ...]]] = {}
    for name, made in loading.carried.made.items():
        if made.converter is None:
            continue
        number = next(
            (i for i, c in enumerate(converters) if _patterns(c) == _patterns(made.converter)), -1
        )
        shapes = tuple(tensors[key].shape for key in made.sources)
        groups.setdefault((number, shapes), (converters[number], name, made.sources))
    results: dict[int, tuple[Any, Reversal]] = {}
    for (number, _), (converter, _, sources) in groups.items():
        before = results.get(number)
        if before is None or before[1].ok:
            # What the converter sees, and so what its reverse gives back.
            names = {
                key: rename_checkpoint_key(key, renamings, [], None, None)[0] for key in sources
            }
            results[number] = (converter, _check(converter, names, tensors, model))
    for number, (converter, reversal) in results.items():
        stray = _stray(converter, loading) if reversal.ok else ""
        if stray:
            results[number] = (converter, dataclasses.replace(reversal, problem=stray))
    return [results[number] for number in sorted(results)]


def _stray(converter: Any, loading: Loading) -> str:
    """Return what is wrong if a save would turn back a key that the converter did not make."""
    reverse = converter.reverse_transform()
    for key in loading.state:
        made = loading.carried.made.get(key)
        if made is not None and made.converter is not None:
            continue
        if rename_checkpoint_key(key, [], [reverse], None, None)[1] is not None:
            return f"saving, it would also take {key}, which it did not make; use another name"
    return ""


def _check(
    converter: Any,
    names: dict[str, str],
    tensors: Mapping[str, StoredTensor],
    model: nn.Module,
) -> Reversal:
    total = sum(math.prod(tensors[key].shape) for key in names)
    problem, checked = "", True
    try:
        if total <= _FULL:
            problem = _round_trip(converter, _random(names, tensors, whole=True), model)
        else:
            problem = _round_trip(converter, _metas(names, tensors), model)
            if not problem:
                try:
                    cut = _random(names, tensors, whole=False)
                    problem = _round_trip(converter, cut, model)
                except Exception:  # noqa: BLE001  (an operation that needs the last dimension)
                    checked = False
    except NotImplementedError:
        problem = "an operation has no reverse"
    except Exception as error:  # noqa: BLE001  (users' operations; told in the report)
        problem = f"{type(error).__name__}: {error}"
    return Reversal(
        tuple(converter.source_patterns),
        tuple(converter.target_patterns),
        tuple(repr(operation) for operation in converter.operations),
        problem,
        checked,
    )


def _round_trip(converter: Any, tensors: dict[str, torch.Tensor], model: nn.Module) -> str:
    """Return what is wrong with a converter's way there and back, "" for nothing."""
    forward = _carry(copy.deepcopy(converter), tensors, model)
    backward = _carry(converter.reverse_transform(), forward, model)
    for key, tensor in tensors.items():
        again = backward.get(key)
        if again is None:
            came = ", ".join(name for name in backward if name not in tensors)
            return f"{key} does not come back{f' ({came} does)' if came else ''}"
        if again.shape != tensor.shape:
            return f"{key} of shape {tuple(tensor.shape)} comes back as {tuple(again.shape)}"
        if tensor.device.type != "meta" and not torch.equal(again, tensor):
            return f"{key} comes back with other values"
    return ""


def _carry(
    converter: Any, tensors: Mapping[str, torch.Tensor], model: nn.Module
) -> dict[str, torch.Tensor]:
    groups: dict[str, dict[str, list[torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        name, pattern = rename_checkpoint_key(key, [], [converter], None, None)
        if pattern is not None:
            groups.setdefault(name, {}).setdefault(pattern, []).append(tensor)
    made: dict[str, torch.Tensor] = {}
    for name, by_pattern in groups.items():
        made.update(run_converter(copy.deepcopy(converter), name, by_pattern, model))
    return made


def _random(
    names: dict[str, str], tensors: Mapping[str, StoredTensor], *, whole: bool
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for key, name in names.items():
        shape = tensors[key].shape
        if not whole and len(shape) > 1:
            shape = (*shape[:-1], min(shape[-1], 2))
        made[name] = torch.rand(shape, generator=generator)
    return made


def _metas(names: dict[str, str], tensors: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    return {name: meta_tensor(tensors[key]).to(torch.float32) for key, name in names.items()}


def _patterns(converter: Any) -> tuple[Any, ...]:
    scope = getattr(converter, "scope_prefix", None)
    return tuple(converter.source_patterns), tuple(converter.target_patterns), scope
