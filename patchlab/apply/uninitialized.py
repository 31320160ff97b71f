"""What a load has not filled, noted while it initializes that.

What a checkpoint lacks is made by `torch.empty` after everything else is loaded, and then the
model's `_init_weights` runs, which knows nothing of a replacement's own tensors (transformers
5.24.0, `_move_missing_keys_from_meta_to_device`). What it writes to is random for the most part;
what nothing writes to holds whatever was in memory. transformers calls both newly initialized.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patchlab.apply.construct import Frame, Left, open_frames
from patchlab.apply.telling import warn_caller
from patchlab.mapping.registry import registered_mapping
from patchlab.plan.findings import Finding, Severity
from patchlab.plan.plan import Replacement
from patchlab.plan.wording import listed

# Kinds of tensors that a load has not filled: what nothing has written to, of which a constant can
# be in no checkpoint, and what the model has initialized.
UNINITIALIZED, CONSTANT, RANDOM = "uninitialized", "constant", "random"
METHOD = "init_new_weights"
_LOADED = "_is_hf_initialized"
# Of which model it was asked last whether a load fills it, and the answer.
_answer: tuple[Callable[[], nn.Module | None], bool] = (lambda: None), False
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
    model: nn.Module,
    module: nn.Module,
    by_model: Callable[[], object],
    by_own: Callable[[], object] | None,
) -> None:
    """Initialize one module of a model, and note for the open scopes what was not loaded.

    Where no scope is open, and the module is of a class that is registered, a warning tells what is
    left as it was.

    Args:
        model: The model that initializes.
        module: A module of it.
        by_model: What the model does.
        by_own: What a replacement does for itself, None if it does nothing.
    """
    if not _is_loaded(model):
        by_model()
        if by_own is not None:
            by_own()
        return
    frames = [frame for frame in open_frames() if not frame.dry and frame.constructions is None]
    waiting = _unloaded(module)
    if waiting and not frames and not _is_registered(type(module)):
        waiting = {}
    written: list[set[int]] = []
    watches = bool(waiting) or any(frame.left for frame in frames)
    for step in (by_model, by_own):
        with Writes() if watches else nullcontext() as writes:
            if step is not None:
                step()
        written.append(writes.storages if writes is not None else set())
    model_wrote, own_wrote = written
    left = {}
    for name, tensor in waiting.items():
        storage = tensor.untyped_storage()._cdata
        kind = CONSTANT if name in module._non_persistent_buffers_set else UNINITIALIZED
        if storage in model_wrote and kind is UNINITIALIZED:
            kind = RANDOM
        if storage not in own_wrote and (kind is RANDOM or storage not in model_wrote):
            left[storage] = Left(weakref.ref(module), name, kind)
    for frame in frames:
        # A replacement's method may write to what is left of the modules in it.
        for storage in own_wrote:
            frame.left.pop(storage, None)
        frame.left.update(left)
    if not frames:
        name = type(module).__name__
        told = [LeftTensor("", name, item.name, item.kind) for item in left.values()]
        warn_caller(left_findings(item for item in told if item.kind is not RANDOM))


@dataclass(frozen=True, slots=True)
class LeftTensor:
    """One tensor that was left, as a report tells it.

    Attributes:
        key: The key of the rule.
        replacement: The name of the replacement.
        name: The tensor's name in the replacement.
        kind: What has become of it.
    """

    key: str
    replacement: str
    name: str
    kind: str


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
                if left.kind is RANDOM and hasattr(rule.replacement, METHOD):
                    continue  # It says itself what is new in it.
                name = name.removeprefix(f"{above}.") if above else name
                yield LeftTensor(rule.key, rule.replacement.__name__, name, left.kind)


def left_findings(left: Iterable[LeftTensor]) -> Iterator[Finding]:
    """Tell of what was not loaded: PL301 of weights, PL303 of constants."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for item in left:
        group = groups.setdefault((item.key, item.replacement, item.kind), [])
        if item.name not in group:
            group.append(item.name)
    for (key, replacement, kind), names in groups.items():
        code = "PL303" if kind is CONSTANT else "PL301"
        severity: Severity = "warning" if kind is RANDOM else "error"
        yield Finding(code, severity, key, replacement, _message(replacement, names, kind))


def _unloaded(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own tensors that the load of its model has not filled."""
    if getattr(module, _LOADED, False):
        return {}
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or type(tensor) not in _PLAIN or tensor.device.type == "meta":
            continue
        if not getattr(tensor, _LOADED, False):
            waiting[name] = tensor
    return waiting


def _is_loaded(model: nn.Module) -> bool:
    """Tell whether a load fills a model: `from_config` marks nothing as loaded.

    Asked for each module of it, one model after another, so the last answer is kept.
    """
    global _answer
    asked, known = _answer
    if asked() is model:
        return known
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return False  # It is being constructed.
    known = any(getattr(parameter, _LOADED, False) for parameter in model.parameters())
    _answer = weakref.ref(model), known
    return known


def _is_registered(cls: type) -> bool:
    return any(rule.replacement is cls for rule in registered_mapping())


def _message(replacement: str, names: list[str], kind: str) -> str:
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    said = f"{listed(names)} of {replacement} {are} "
    own = f"a method {METHOD}(self) that sets {them} with transformers.initialization"
    if kind is RANDOM:
        return (
            f"{said}not in the checkpoint, and {are} newly initialized by the model, at random for "
            f"the most part. To hold what the original holds, {replacement} needs the old names or "
            f"a weight conversion. If {them.replace('them', 'they')} {are} new, give it {own}."
        )
    if kind is CONSTANT:
        return (
            f"{said}computed in the constructor and in no checkpoint, and nothing has initialized "
            f"{them}: uninitialized memory after from_pretrained. Give {replacement} {own}."
        )
    return (
        f"{said}not in the checkpoint, and nothing has initialized {them}: uninitialized memory "
        f"after from_pretrained. Give {replacement} {own}, or give a weight conversion."
    )
