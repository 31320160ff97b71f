"""Where the keys of a checkpoint come to rest in a patched model, without one tensor read.

The keys go through transformers' own renaming and the converters' own operations, on tensors of the
meta device that have the shapes of the header. What comes out is what `from_pretrained` would
assign, with shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab._upstream import expected_keys, tied_keys
from patchlab.apply.transforms import Carried, carry_forward
from patchlab.verify.checkpoint_files import StoredTensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A key whose shape differs.

    Attributes:
        key: The key in the model.
        found: The shape in the checkpoint, after conversions.
        wanted: The shape in the model.
    """

    key: str
    found: tuple[int, ...]
    wanted: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.key}: {self.found} in the checkpoint, {self.wanted} in the model"


@dataclass(frozen=True, eq=False, slots=True)
class Loading:
    """What a load would do.

    Attributes:
        loaded: Keys of the model that take a tensor as it is, tied ones included.
        converted: Keys of the model that a converter makes.
        missing: Keys of the model that nothing is for.
        unexpected: Keys of the checkpoint that have no place.
        mismatched: Keys whose shapes differ.
        failed: Keys of the model whose converter raised, with the message.
        carried: The tensors behind it, on the meta device.
        state: The model's state dict.
    """

    loaded: frozenset[str]
    converted: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    failed: tuple[tuple[str, str], ...]
    carried: Carried
    state: Mapping[str, torch.Tensor]


def meta_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a tensor of that shape and type that holds nothing."""
    return torch.empty(stored.shape, dtype=_DTYPES.get(stored.dtype, torch.uint8), device="meta")


def plan_loading(
    model: nn.Module, tensors: Mapping[str, StoredTensor], transforms: list[Any]
) -> Loading:
    """Work out what loading a checkpoint into a model would do.

    Args:
        model: The patched skeleton, on the meta device.
        tensors: What the checkpoint's headers say.
        transforms: Renamings and converters, as a load would use them.
    """
    state = model.state_dict()
    metas = {key: meta_tensor(stored) for key, stored in tensors.items()}
    carried = carry_forward(metas, transforms, model, state)
    loaded: set[str] = set()
    converted: set[str] = set()
    mismatched: list[Mismatch] = []
    for key, made in carried.made.items():
        (loaded if made.converter is None else converted).add(key)
        if made.tensor.shape != state[key].shape:
            mismatched.append(Mismatch(key, tuple(made.tensor.shape), tuple(state[key].shape)))
    there = loaded | converted
    for key, source in tied_keys(model).items():
        if (key in state and source in there) or key in there:
            loaded.update({key, source} - converted)
    # One tensor under two names is filled once.
    by_tensor = {id(parameter): name for name, parameter in state.items() if name in there}
    loaded.update(name for name, parameter in state.items() if id(parameter) in by_tensor)
    missing = set(state) - loaded - converted - set(carried.failed)
    missing, unexpected = expected_keys(model, missing, set(carried.unexpected))
    return Loading(
        frozenset(loaded - converted),
        frozenset(converted),
        tuple(key for key in state if key in missing),
        tuple(key for key in carried.unexpected if key in unexpected),
        tuple(mismatched),
        tuple((key, f"{type(e).__name__}: {e}") for key, e in carried.failed.items()),
        carried,
        state,
    )
