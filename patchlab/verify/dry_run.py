"""Dry runs: the skeletons of a preview, built on the meta device, and what that shows.

The unpatched skeleton is built with its constructor calls noted, the patched one in a scope, so
that nothing of it is left, and with what its replacements hold initialized.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlab._upstream import initialize_module, pretrained_model_class
from patchlab.apply.construct import Construction, Frame, close_frame, open_frame
from patchlab.apply.hooks import without_registered
from patchlab.mapping.rules import PatchMapping
from patchlab.model.skeleton import build_unpatched
from patchlab.plan.evidence import BuildFailure, ConstructorCall

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, eq=False, slots=True)
class Built:
    """A skeleton, or why there is none."""

    model: nn.Module | None
    failure: BuildFailure | None = None
    calls: tuple[ConstructorCall, ...] = ()


def build_observed(build: Callable[[Any], nn.Module], config: Any, mapping: PatchMapping) -> Built:
    """Build the unpatched skeleton and note how the matched classes are constructed in it.

    Raises:
        TargetError: The model's own constructor fails: without a patch that is no finding.
    """
    noted: list[Construction] = []
    with _framed(Frame(mapping, constructions=noted, dry=True)):
        model = build_unpatched(build, config)
    return Built(model, calls=_distinct_calls(noted))


def build_patched(build: Callable[[Any], nn.Module], config: Any, mapping: PatchMapping) -> Built:
    """Build the patched skeleton; an error in it is the result, not raised."""
    model = None
    frame = Frame(mapping, dry=True)
    try:
        with _framed(frame):
            model = build(config)
        _initialize_replaced(model, frame)
    except Exception as error:  # noqa: BLE001  (a replacement may raise anything; it is reported)
        return Built(model, _failure(error, mapping))
    return Built(model)


@contextlib.contextmanager
def _framed(frame: Frame) -> Iterator[None]:
    with without_registered():
        open_frame(frame)
        try:
            yield
        finally:
            close_frame(frame)


def _initialize_replaced(model: nn.Module, frame: Frame) -> None:
    """Run the model's own initializer on a replacement of each original, and on what it holds.

    On the meta device transformers leaves that out, and `from_config` does not.
    """
    base = pretrained_model_class()
    owners: dict[int, nn.Module] = {}
    for owner in model.modules():  # outer models first, so that the innermost is kept
        if isinstance(owner, base):
            owners.update((id(module), owner) for module in owner.modules())
    seen: set[type] = set()
    for replaced in frame.replaced:
        module = replaced.module()
        if module is None or id(module) not in owners or replaced.original in seen:
            continue
        seen.add(replaced.original)
        with torch.no_grad(), torch.device("meta"):
            # What the replacement brings with it, such as a lazy layer, is initialized too.
            for part in module.modules():
                initialize_module(owners[id(part)], part)


def _distinct_calls(noted: list[Construction]) -> tuple[ConstructorCall, ...]:
    found: dict[tuple[Any, ...], ConstructorCall] = {}
    for construction in noted:
        form = (construction.original, len(construction.args), tuple(construction.kwargs))
        if form not in found:
            found[form] = ConstructorCall(
                construction.original,
                construction.args,
                construction.kwargs,
                _call_text(construction.args, construction.kwargs),
            )
    return tuple(found.values())


def _call_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return ", ".join(
        [*map(_value_text, args), *(f"{k}={_value_text(v)}" for k, v in kwargs.items())]
    )


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if hasattr(value, "model_type"):
        return "config"
    return type(value).__name__


def _failure(error: Exception, mapping: PatchMapping) -> BuildFailure:
    """Say in which function a build failed, and for the sake of which class."""
    frames = list(traceback.walk_tb(error.__traceback__))
    replacements = {rule.replacement for rule in mapping}
    stage, subject, at = "parent", type(error).__name__, frames[-1]
    for frame, line in frames:
        name, local = frame.f_code.co_name, frame.f_locals
        owner = local.get("self")
        if name == "_init_weights" and isinstance(local.get("module"), nn.Module):
            stage, subject, at = "init_weights", type(local["module"]).__name__, (frame, line)
        elif name == "__init__" and isinstance(owner, nn.Module):
            at = (frame, line)
            stage = "constructor" if type(owner) in replacements else "parent"
            subject = type(owner).__name__
    code = at[0].f_code
    where = f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
    file = code.co_filename.rpartition("/")[2]
    return BuildFailure(shortly(error), f"{where} ({file}:{at[1]})", subject, stage)


def shortly(error: Exception) -> str:
    """Return an error in a line, without what differs from run to run."""
    lines = str(error).strip().splitlines()
    # Addresses differ from run to run; the first sentences of a long text say what it is about.
    text = textwrap.shorten(_ADDRESS.sub("", lines[0] if lines else ""), 240, placeholder=" …")
    return f"{type(error).__name__}: {text}".rstrip(": ") + ("" if text.endswith(".") else ".")
