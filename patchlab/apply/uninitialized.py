"""What a load leaves as uninitialized memory, noted while it initializes what it did not load.

What a checkpoint lacks is made by `torch.empty` after everything else is loaded, and then the
model's `_init_weights` runs, which knows nothing of a replacement's own tensors (transformers
5.24.0, `_move_missing_keys_from_meta_to_device`). What is written to then is noted; the rest holds
whatever was in memory, and transformers calls it newly initialized.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patchlab.apply.construct import Frame, Left, open_frames
from patchlab.errors import FindingWarning
from patchlab.mapping.registry import registered_mapping
from patchlab.plan.findings import Finding
from patchlab.plan.plan import Replacement
from patchlab.plan.wording import listed

_LOADED = "_is_hf_initialized"
_PLAIN = (nn.Parameter, torch.Tensor, nn.Buffer)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that in-place operations write to, views and all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self.storages.add(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def watch_initialization(
    model: nn.Module, module: nn.Module, initialize: Callable[[], None]
) -> None:
    """Initialize one module of a model, and note for the open scopes what is still left.

    Where no scope is open, and the module is of a class that is registered, a warning tells it.
    """
    frames = [frame for frame in open_frames() if not frame.dry and frame.constructions is None]
    wanted = bool(frames) or type(module) in {rule.replacement for rule in registered_mapping()}
    waiting = _unloaded(model, module) if wanted else {}
    if not waiting and not any(frame.left for frame in frames):
        initialize()
        return
    with Writes() as writes:
        initialize()
    left = {
        tensor.untyped_storage()._cdata: Left(
            weakref.ref(module), name, name in module._non_persistent_buffers_set
        )
        for name, tensor in waiting.items()
        if tensor.untyped_storage()._cdata not in writes.storages
    }
    for frame in frames:
        # A replacement's method may write to what is left of the modules in it.
        for storage in writes.storages:
            frame.left.pop(storage, None)
        frame.left.update(left)
    if left and not frames:
        key, name = "", type(module).__name__
        told = [LeftTensor(key, name, item.name, item.is_constant) for item in left.values()]
        for finding in left_findings(told):
            warnings.warn(str(finding), FindingWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class LeftTensor:
    """One tensor that was left, as a report tells it.

    Attributes:
        key: The key of the rule.
        replacement: The name of the replacement.
        name: The tensor's name in the replacement.
        is_constant: Whether it is a buffer that no checkpoint has.
    """

    key: str
    replacement: str
    name: str
    is_constant: bool


def left_in(
    walked: Iterable[tuple[str, nn.Module]], replacements: Iterable[Replacement], frame: Frame
) -> Iterator[LeftTensor]:
    """Yield what a load has left of the replacements in a model, and of the modules in them."""
    found: dict[int, list[Left]] = {}
    for left in list(frame.left.values()):
        found.setdefault(id(left.module()), []).append(left)
    if not found:
        return
    places = {fqn: replacement for replacement in replacements for fqn in replacement.fqns}
    for fqn, module in walked:
        for left in found.get(id(module), ()):
            above = fqn
            while above and above not in places:
                above = above.rpartition(".")[0]
            if above in places:
                rule, name = places[above].rule, f"{fqn}.{left.name}".lstrip(".")
                name = name.removeprefix(f"{above}.") if above else name
                yield LeftTensor(rule.key, rule.replacement.__name__, name, left.is_constant)


def left_findings(left: Iterable[LeftTensor]) -> Iterator[Finding]:
    """Tell of what is left: PL301 of weights, PL303 of constants."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for item in left:
        group = groups.setdefault((item.key, item.replacement, item.is_constant), [])
        if item.name not in group:
            group.append(item.name)
    for (key, replacement, is_constant), names in groups.items():
        code = "PL303" if is_constant else "PL301"
        yield Finding(code, "error", key, replacement, _message(replacement, names, is_constant))


def _unloaded(model: nn.Module, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own tensors that its model's load has not filled; {} if it was no load."""
    if getattr(module, _LOADED, False):
        return {}
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or type(tensor) not in _PLAIN or tensor.device.type == "meta":
            continue
        if not getattr(tensor, _LOADED, False):
            waiting[name] = tensor
    # Nothing is marked as loaded where a constructor has filled everything, as in `from_config`.
    is_load = bool(waiting) and any(getattr(p, _LOADED, False) for p in model.parameters())
    return waiting if is_load else {}


def _message(replacement: str, names: list[str], is_constant: bool) -> str:
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    what, also = "not in the checkpoint", ", or give a weight conversion"
    if is_constant:
        what, also = "computed in the constructor and in no checkpoint", ""
    return (
        f"{listed(names)} of {replacement} {are} {what}, and nothing has initialized {them}: "
        f"uninitialized memory after from_pretrained. Give {replacement} a method "
        f"init_new_weights(self) that sets {them} with transformers.initialization{also}."
    )
