"""How modules are called and what they return, seen where nothing is computed: on the meta device.

A skeleton is run once on token ids, at batch 3: with a batch of 2 a single tensor passes for two
return values. One layer is enough to see how its parts are called, so a model of sixty is not run
to the end. Models whose forward needs values, or other inputs than tokens, cannot be run, and are
judged without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Cache

from patchlab.plan.evidence import ForwardCall
from patchlab.verify.dry_run import shortly

BATCH, LENGTH = 3, 4
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, eq=False, slots=True)
class ForwardRun:
    """What one run has shown.

    Attributes:
        calls: FQN → how it was called, of the modules asked for and of those that hold them.
        arguments: FQN → with what, of the modules asked for; the tensors are on the meta device.
        forms: FQN → what came back, down to shapes and dtypes.
        failure: The error, "" if there was none.
    """

    calls: Mapping[str, ForwardCall] = field(default_factory=dict)
    arguments: Mapping[str, Arguments] = field(default_factory=dict)
    forms: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


NOT_RUN = ForwardRun()


class _SeenEnough(Exception):
    """Ends a run once every module that was asked for has been called."""


def run_forward(model: nn.Module, fqns: Collection[str]) -> ForwardRun:
    """Run a skeleton until some modules and their parents have been called.

    Args:
        model: The skeleton.
        fqns: The modules to see; those that the model does not have are passed over.
    """
    modules = dict(model.named_modules())
    parents = {fqn.rpartition(".")[0] for fqn in fqns}
    waiting = {fqn for fqn in {*fqns, *parents} if fqn in modules and not is_holder(modules[fqn])}
    calls: dict[str, ForwardCall] = {}
    arguments: dict[str, Arguments] = {}
    forms: dict[str, Any] = {}

    def before(fqn: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            arguments.setdefault(fqn, _kept((args, kwargs)))

        return note

    def after(fqn: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.setdefault(fqn, _call(args, kwargs, output))
            forms.setdefault(fqn, form_of(output))
            waiting.discard(fqn)
            if not waiting:
                raise _SeenEnough

        return note

    hooks = []
    for fqn in list(waiting):
        module = modules[fqn]
        if fqn in fqns:
            hooks.append(module.register_forward_pre_hook(before(fqn), with_kwargs=True))
        hooks.append(module.register_forward_hook(after(fqn), with_kwargs=True))
    training = {module: module.training for module in modules.values()}
    failure = ""
    try:
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
        with torch.no_grad(), torch.device("meta"):
            model.eval()(input_ids=tokens)
    except _SeenEnough:
        pass
    except Exception as error:  # noqa: BLE001  (the caller decides)
        failure = shortly(error)
    finally:
        for module, was in training.items():
            module.training = was
        for hook in hooks:
            hook.remove()
    return ForwardRun(calls, arguments, forms, failure)


def call_again(
    modules: Mapping[str, nn.Module], fqns: Collection[str], seen: ForwardRun
) -> ForwardRun | None:
    """Call modules as others of the same names were called in a run.

    Args:
        modules: FQN → module of a skeleton.
        fqns: The modules to call.
        seen: The run.

    Returns:
        None if it cannot be told so what a run would show: a call fails, or returns something of
        the same number of values and of other shapes, which may be too much for what comes after.
    """
    calls: dict[str, ForwardCall] = {}
    forms: dict[str, Any] = {}
    for fqn in fqns:
        if fqn not in seen.calls:
            continue
        args, kwargs = _kept(seen.arguments[fqn])
        module = modules[fqn]
        training = [(part, part.training) for part in module.modules()]
        try:
            with torch.no_grad(), torch.device("meta"):
                output = module.eval()(*args, **kwargs)
        except Exception:  # noqa: BLE001  (a run says where it fails)
            return None
        finally:
            for part, was in training:
                part.training = was
        calls[fqn] = _call(args, kwargs, output)
        forms[fqn] = form_of(output)
        if calls[fqn].returned == seen.calls[fqn].returned and forms[fqn] != seen.forms[fqn]:
            return None
    return ForwardRun(calls, forms=forms)


def is_holder(module: nn.Module) -> bool:
    """Tell whether a module is a list or dict of modules that has no forward to call.

    A subclass may well have one, as a list of experts that routes to them.
    """
    holds = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return holds and type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)


def returned(output: Any) -> str:
    """Say what came back: "a tensor", "2 values", or the type's name."""
    if isinstance(output, torch.Tensor):
        return "a tensor"
    if type(output) in (tuple, list):
        return f"{len(output)} values" if len(output) != 1 else "a tuple of one value"
    return f"a {type(output).__name__}"


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ForwardCall:
    values = output if type(output) in (tuple, list) else (output,)
    shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in values]
    return ForwardCall(len(args), tuple(kwargs), returned(output), tuple(shapes))


def form_of(value: Any) -> Any:
    """Return what can be compared of a value: shapes and dtypes, down to what it holds."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(form_of, value))
    if isinstance(value, dict):
        return tuple((key, form_of(item)) for key, item in value.items())
    return type(value)


def _kept(arguments: Arguments) -> Arguments:
    """Copy what a call would change: a key-value cache grows with each."""
    args, kwargs = arguments
    return tuple(map(_fresh, args)), {name: _fresh(value) for name, value in kwargs.items()}


def _fresh(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, Cache) else value
