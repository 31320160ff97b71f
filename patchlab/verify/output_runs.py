"""Runs of a model whose module outputs are recorded, or compared with recorded ones."""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patchlab.errors import TargetError

# Beside 1e-6 absolute: what a different order of summation makes over the depth of a model.
_RELATIVE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}
_LONG = 0.5  # seconds; a forward that takes longer is timed once


@dataclass(slots=True)
class Difference:
    """The difference of one module's outputs over its calls.

    Attributes:
        max_abs: The largest of two elements.
        max_rel: The largest of a tensor, divided by the largest element of the first model's.
        ok: Whether every tensor is within the tolerance of its dtype.
        comparable: Whether there are as many tensors, of the same shapes.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    ok: bool = True
    comparable: bool = True

    def add(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        """Take in one call."""
        if [t.shape for t in before] != [t.shape for t in after]:
            self.ok = self.comparable = False
            return
        for one, other in zip(before, after, strict=True):
            absolute, scale = _difference(one, other.to(one.device))
            relative = absolute / scale if scale else (math.inf if absolute else 0.0)
            self.max_abs = max(self.max_abs, absolute)
            self.max_rel = max(self.max_rel, relative)
            coarse = max(_RELATIVE.get(one.dtype, 0.0), _RELATIVE.get(other.dtype, 0.0))
            floor = 1e-6 if coarse else 0.0
            if not absolute <= floor + coarse * scale:
                self.ok = False


@dataclass(eq=False)
class Run:
    """What one run saw, by FQN, in the order in which first calls end.

    Attributes:
        calls: How often a module was called.
        classes: The names of the modules' classes.
        seconds: Time in a module and below it.
        outputs: The tensors of each call; empty for a run that compares.
    """

    calls: dict[str, int] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, list[list[torch.Tensor]]] = field(default_factory=dict)


def record_run(model: nn.Module, inputs: Any) -> Run:
    """Run a model and keep what its modules return, on the CPU."""
    run = Run()

    def keep(fqn: str, tensors: list[torch.Tensor]) -> None:
        run.outputs.setdefault(fqn, []).append([t.detach().to("cpu", copy=True) for t in tensors])

    _observed(model, inputs, run, keep)
    return run


def compare_run(model: nn.Module, inputs: Any, recorded: Run) -> tuple[Run, dict[str, Difference]]:
    """Run a model and compare what its modules return with what another's did.

    A call that the other model did not make counts as not comparable. What was compared is let go
    of, so the memory of the recorded run shrinks meanwhile.
    """
    run = Run()
    differences: dict[str, Difference] = {}

    def compare(fqn: str, tensors: list[torch.Tensor]) -> None:
        waiting = recorded.outputs.get(fqn)
        if waiting is None:
            return
        difference = differences.setdefault(fqn, Difference())
        if waiting:
            difference.add(waiting.pop(0), [t.detach() for t in tensors])
        else:
            difference.ok = difference.comparable = False

    _observed(model, inputs, run, compare)
    for fqn, waiting in recorded.outputs.items():
        if waiting and fqn in differences:
            differences[fqn].ok = differences[fqn].comparable = False
    return run, differences


def cost_of(model: nn.Module, inputs: Any) -> tuple[float, int]:
    """Return the seconds of a forward and its peak memory in bytes, beside the parameters."""
    device = _device_of(model)
    accelerated = device is not None and device.type == "cuda"
    if accelerated:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        resting = torch.cuda.memory_allocated(device)
    seconds = math.inf
    # The best of three, where that costs nothing: the first pays for what is set up once.
    for _ in range(3):
        start = time.perf_counter()
        _call(model, inputs)
        if accelerated:
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
        if seconds > _LONG:
            break
    if accelerated:
        return seconds, torch.cuda.max_memory_allocated(device) - resting
    with _Alive() as alive:
        _call(model, inputs)
    return seconds, alive.peak


def _observed(
    model: nn.Module, inputs: Any, run: Run, see: Callable[[str, list[torch.Tensor]], None]
) -> None:
    started: dict[str, list[float]] = {}
    handles = []
    try:
        for fqn, module in model.named_modules():
            run_class = type(module).__name__

            def before(module: nn.Module, args: Any, kwargs: Any, fqn: str = fqn) -> None:
                started.setdefault(fqn, []).append(time.perf_counter())

            def after(
                module: nn.Module,
                args: Any,
                kwargs: Any,
                output: Any,
                fqn: str = fqn,
                name: str = run_class,
            ) -> None:
                run.seconds[fqn] = (
                    run.seconds.get(fqn, 0.0) + time.perf_counter() - started[fqn].pop()
                )
                run.calls[fqn] = run.calls.get(fqn, 0) + 1
                run.classes[fqn] = name
                see(fqn, list(_tensors_in(output)))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        _call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    # The model itself ends last.
    for noted in (run.calls, run.classes, run.seconds):
        if "" in noted:
            noted[""] = noted.pop("")  # type: ignore[assignment]


def _call(model: nn.Module, inputs: Any) -> Any:
    device = _device_of(model)
    given = _moved(copy.deepcopy(inputs), device)
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(0)
        try:
            if isinstance(given, Mapping):
                return model(**given)
            if isinstance(given, tuple):
                return model(*given)
            if isinstance(given, torch.Tensor):
                return model(given)
        except Exception as error:
            raise TargetError(
                f"the forward of {type(model).__name__} raised {type(error).__name__}: {error}"
            ) from error
    raise TargetError(
        f"inputs are a dict of keyword arguments, a tuple of positional ones or a tensor; got "
        f"{type(inputs).__name__}."
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest element; not-a-numbers at one place agree."""
    if not one.numel():
        return 0.0, 0.0
    if one.is_complex() or other.is_complex():
        one, other = (
            torch.view_as_real(one.to(torch.complex128)),
            torch.view_as_real(other.to(torch.complex128)),
        )
    one, other = one.double(), other.double()
    apart = torch.where(
        (one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs()
    ).nan_to_num(nan=math.inf, posinf=math.inf)
    finite = torch.where(one.isfinite(), one, 0.0)
    return float(apart.max()), float(finite.abs().max())


def _tensors_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output, in order; caches and other objects are passed over."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen = seen | {id(value)}
    if isinstance(value, Mapping):
        items: list[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, f.name, None) for f in fields(value)]
    else:
        return
    for item in items:
        yield from _tensors_in(item, seen)


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _moved(value: Any, device: torch.device | None) -> Any:
    if device is None or device.type == "meta":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is dict:
        return {name: _moved(item, device) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations made and that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors_in([args, kwargs])}
        for tensor in _tensors_in([result]):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._holders:
                self._holders[key] += 1
            elif key in given:
                continue
            else:
                self._holders[key] = 1
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(tensor, self._let_go, key, size).atexit = False
        return result

    def _let_go(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= size
