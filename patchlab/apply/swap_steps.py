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
from patchlab.apply.swap_tensors import Converted
from patchlab.errors import SwapError
from patchlab.mapping.rules import PatchMapping

_MISSING = object()


class Step:
    """One change of a commit that can be taken back; taking back what was not done does no harm."""

    def __init__(
        self,
        do: Callable[[], None],
        undo: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.do, self.undo, self.check = do, undo, check


def take_back(steps: list[Step]) -> None:
    """Take back every step, the last one first."""
    for step in reversed(steps):
        step.undo()


def commit_steps(
    model: nn.Module, built: list[Built], converted: dict[int, Converted], rules: PatchMapping
) -> list[Step]:
    """Prepare what hangs the new modules in, root or not, and what goes with them."""
    steps = []
    for item in built:
        for slot in item.site.slots:
            steps.append(_slot_step(slot.parent, slot.name, item))
        if not item.site.slots:
            steps.append(_root_step(model, item))
    owners = {id(item.site.owner): item.site.owner for item in built if item.site.owner is not None}
    for number, owner in owners.items():
        transforms = converted[number].transforms
        if transforms is not None:
            steps.append(_attribute_step(owner, "_weight_conversions", transforms))
    if built:
        pretrained = pretrained_model_class()
        for module in model.modules():
            if isinstance(module, pretrained):
                steps.append(_recorder_step(module, rules))
    return steps


def _slot_step(parent: nn.Module, name: str, item: Built) -> Step:
    new, old = item.module, item.site.module
    flags = {part: part.training for part in new.modules()}
    olds = dict(old.named_modules())

    def do() -> None:
        parent._modules[name] = new

    def undo() -> None:
        if parent._modules.get(name) is new:
            parent._modules[name] = old
            # A model that was set to train or eval meanwhile stays in that mode.
            for path, part in new.named_modules():
                if path in olds and part in flags and part.training != flags[part]:
                    olds[path].training = part.training

    def check() -> None:
        if parent._modules.get(name) not in (new, old):
            found = type(parent._modules.get(name)).__name__
            raise SwapError(
                f"{item.site.fqn} is a {found} that was put there after this swap. Undo later "
                f"swaps first, the last one first."
            )

    return Step(do, undo, check)


def _root_step(model: nn.Module, item: Built) -> Step:
    """Replace the root: the object stays, and takes the new class and the new attributes."""
    old_class, old_vars = type(model), vars(model)
    new_class, new_vars = type(item.module), vars(item.module)
    for name, value in old_vars.items():
        new_vars.setdefault(name, value)

    def do() -> None:
        model.__dict__ = new_vars
        model.__class__ = new_class

    def undo() -> None:
        if vars(model) is new_vars:
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
