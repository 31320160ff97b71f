"""Output recorders that follow a patch, kept on the instance.

transformers records outputs (`output_attentions=True` and the like) through hooks on the modules of
certain classes, listed in the class attribute `_can_record_outputs`. A replacement that is no
subclass of its original is in no such list, and its outputs would be missing. transformers 5.24.0
(`monkey_patching.patch_output_recorders`) writes the replacement into the class attribute, where it
stays for every model of the class, also after the patch is gone.

Here a model built under a patch gets a changed *copy* as an instance attribute; the class and the
registry stay as they are. So models built before, during and after a scope all record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from patchlab._upstream import output_recorder_class, use_instance_recorders
from patchlab.errors import TargetError
from patchlab.mapping.registry import registered_mapping
from patchlab.mapping.rules import PatchMapping, brief


def patch_output_recorders(model: nn.Module) -> None:
    """Let a model record the outputs of the replacement classes that are registered.

    Needed only for models built by hand before they were registered; whatever is built under a
    patch has it already. The classes of the model are not changed.

    Args:
        model: The model; its sub-models are included.

    Raises:
        TargetError: `model` is no `torch.nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"patch_output_recorders takes a model, got {brief(model)}. Give the model itself."
        )
    mapping = registered_mapping()
    for module in model.modules():
        adopt_recorders(module, (mapping,))


def adopt_recorders(model: nn.Module, mappings: Sequence[PatchMapping]) -> None:
    """Give one model instance recorders that also look for the replacements of their classes.

    Args:
        model: Any module; only those whose class can record outputs are touched.
        mappings: Innermost first; the first that decides a class is taken.
    """
    recorders = getattr(model, "_can_record_outputs", None)
    if not isinstance(recorders, dict):
        return
    adopted = {name: _adopted(specs, mappings) for name, specs in recorders.items()}
    if all(adopted[name] is specs for name, specs in recorders.items()):
        return
    model.__dict__["_can_record_outputs"] = adopted
    use_instance_recorders()


def _adopted(specs: Any, mappings: Sequence[PatchMapping]) -> Any:
    """Return one output's recorders with those for replacements added, or `specs` itself."""
    found = list(specs) if isinstance(specs, list | tuple) else [specs]
    adopted = list(found)
    for spec in found:
        for extra in _for_replacements(spec, mappings):
            if extra not in adopted:
                adopted.append(extra)
    return adopted if len(adopted) > len(found) else specs


def _for_replacements(spec: Any, mappings: Sequence[PatchMapping]) -> Iterator[Any]:
    is_recorder = isinstance(spec, output_recorder_class())
    target = spec.target_class if is_recorder else spec
    if target is None:
        target = spec.class_name
    # What `isinstance` takes: a class or a tuple of them (inkling2_loop), or else a name.
    targets = target if isinstance(target, tuple) else (target,)
    classes = tuple(cls for cls in targets if isinstance(cls, type))
    for each in targets:
        name: Any = getattr(each, "__name__", each)
        decided = [m.find(name) for m in mappings] if isinstance(name, str) else []
        rule = next((rule for rule in decided if rule is not None), None)
        # Hooks go on every instance of the recorder's classes: a subclass has them already, and a
        # second recorder for it would record each output twice.
        if rule is None or issubclass(rule.replacement, classes):
            continue
        if is_recorder:
            yield dataclasses.replace(spec, target_class=rule.replacement, class_name=None)
        else:
            yield rule.replacement
