"""The commit of a swap: each change with its way back, prepared before the first is made.

A step can be taken back at any time and more than once, done or not, and puts back only what it
finds to be its own: so an interrupt anywhere is answered by taking back all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from patchlab._upstream import pretrained_model_class
from patchlab.apply.recorders import adopt_recorders
from patchlab.apply.swap_build import Built
from patchlab.apply.swap_converting import Converted
from patchlab.apply.swap_follow import follower
from patchlab.apply.swap_snapshot import Snapshot
from patchlab.apply.tensor_names import parts_of
from patchlab.errors import SwapError
from patchlab.mapping.rules import PatchMapping

_MISSING = object()
_CALLS = frozenset({"forward", "_old_forward", "_hf_hook", "_compiled_call_impl"})


def _nothing() -> None:
    """Do nothing, in a step that only has something to take back."""


class Step:
    """One change of a commit that can be taken back; taking back what was not done does no harm."""

    def __init__(
        self,
        do: Callable[[], None],
        undo: Callable[[], None],
        check: Callable[[], None] = _nothing,
    ) -> None:
        self.do, self.undo, self.check = do, undo, check


def take_back(steps: list[Step]) -> None:
    """Take back every step, the last one first."""
    for step in reversed(steps):
        step.undo()


def commit_steps(
    model: nn.Module,
    built: list[Built],
    converted: dict[int, Converted],
    rules: PatchMapping,
    snapshots: list[Snapshot],
) -> list[Step]:
    """Prepare what hangs the new modules in, root or not, and what goes with them."""
    # A factory has done its changes already; they are there to be taken back, last of all.
    steps = [Step(_nothing, snapshot.put_back) for snapshot in snapshots if snapshot.changed]
    # Before the others, so that it is done when the old modules are all there again.
    steps.append(Step(_nothing, follower(model, built)))
    for item in built:
        if item.site.module is model:
            steps.append(_root_step(model, item))
            continue
        for slot in item.site.slots:
            steps.append(_slot_step(slot.parent, slot.name, item))
    owners = {id(item.site.owner): item.site.owner for item in built if item.site.owner is not None}
    for number, owner in owners.items():
        transforms = converted[number].transforms
        if transforms is not None:
            steps.append(_attribute_step(owner, "_weight_conversions", transforms))
    if built:
        pretrained = pretrained_model_class()
        for module in parts_of(model).values():
            if isinstance(module, pretrained):
                steps.append(_recorder_step(module, rules))
    return steps


def _slot_step(parent: nn.Module, name: str, item: Built) -> Step:
    new, old = item.module, item.site.module
    follow = _modes(item)

    def do() -> None:
        parent._modules[name] = new

    def undo() -> None:
        if parent._modules.get(name) is new:
            follow()
            parent._modules[name] = old

    def check() -> None:
        there = parent._modules.get(name)
        if there is None:
            raise SwapError(
                f"{item.site.fqn} is gone: it was taken out of the model after this swap. Put it "
                f"back to undo the swap."
            )
        if there is not new and there is not old:
            raise SwapError(
                f"{item.site.fqn} is a {type(there).__name__} that was put there after this swap. "
                f"Undo later swaps first, the last one first."
            )

    return Step(do, undo, check)


def _modes(item: Built) -> Callable[[], None]:
    """Return a function that sets old modules to the mode that was set since on the new ones.

    So a model that is set to train or eval during a swap stays in that mode. It may be called
    again. A part that the new module has not goes with the nearest above it.
    """
    flags = {path: part.training for path, part in item.new_parts.items()}
    # The dicts, since a root that is replaced is the same object with another one meanwhile.
    olds = {path: (part, vars(part)) for path, part in item.old_parts.items()}

    def follow() -> None:
        news = parts_of(item.module)
        inside = {id(part) for part in news.values()}
        for path, (part, attributes) in olds.items():
            if id(part) in inside:
                continue
            near = path
            while near not in news or near not in flags:
                near = near.rpartition(".")[0]
            if news[near].training != flags[near]:
                attributes["training"] = news[near].training

    return follow


def _root_step(model: nn.Module, item: Built) -> Step:
    """Replace the root: the object stays, and takes the new class and the new attributes."""
    old_class, old_vars = type(model), vars(model)
    follow = _modes(item)
    new_class, new_vars = type(item.module), vars(item.module)
    _hand_over(model, item)
    for name, value in old_vars.items():
        # Those run the old class's forward, whatever the class is.
        if name not in _CALLS:
            new_vars.setdefault(name, value)

    def do() -> None:
        model.__dict__ = new_vars
        model.__class__ = new_class

    def undo() -> None:
        if vars(model) is new_vars:
            follow()
            model.__dict__ = old_vars
        if type(model) is new_class:
            model.__class__ = old_class

    def check() -> None:
        if vars(model) is not new_vars and vars(model) is not old_vars:
            raise SwapError(
                f"the root is a {type(model).__name__} from a later swap. Undo later swaps first, "
                f"the last one first."
            )

    return Step(do, undo, check)


def _hand_over(model: nn.Module, item: Built) -> None:
    """Give a new root that holds the old one, as a wrapper does, an object of its own for that.

    The object that was the old root is the new one from here on, and would hold itself.
    """
    old_parts = {id(part) for part in item.old_parts.values()}
    twin: nn.Module | None = None
    for part in item.new_parts.values():
        if id(part) in old_parts:
            continue
        for name, child in part._modules.items():
            if child is model:
                if twin is None:
                    twin = object.__new__(type(model))
                    twin.__dict__ = vars(model)  # The very dict, so undo loses nothing.
                part._modules[name] = twin


def _attribute_step(module: nn.Module, name: str, value: Any) -> Step:
    before = vars(module).get(name, _MISSING)

    def do() -> None:
        vars(module)[name] = value

    def undo() -> None:
        if vars(module).get(name, _MISSING) is value:
            _put_back(module, name, before)

    return Step(do, undo)


def _recorder_step(module: nn.Module, rules: PatchMapping) -> Step:
    before = vars(module).get("_can_record_outputs", _MISSING)

    def undo() -> None:
        if vars(module).get("_can_record_outputs", _MISSING) is not before:
            _put_back(module, "_can_record_outputs", before)

    return Step(lambda: adopt_recorders(module, (rules,)), undo)


def _put_back(module: nn.Module, name: str, before: Any) -> None:
    if before is _MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = before
