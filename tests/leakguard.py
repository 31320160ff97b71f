"""What patches can change in a process, noted before a test and compared after it."""

from __future__ import annotations

import sys

import torch
from torch import nn

NOTHING = object()


def process_state(within: str = "transformers.") -> dict[tuple, object]:
    """Everything in the loaded transformers modules that a patch could leave changed.

    Names bound to module classes, the `__init__` of each class, the registry, the conversions, the
    recorders of classes and of the registry, and the two names in `modeling_utils`. `within` limits
    the names and classes to some Python modules, for who looks a thousand times.
    """
    state: dict[tuple, object] = {
        ("Module.__init_subclass__",): "__init_subclass__" in vars(nn.Module)
    }
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name + ".").startswith(within):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and issubclass(value, nn.Module):
                state[module_name, name] = value
                state[module_name, name, "__init__"] = vars(value).get("__init__", NOTHING)
                recorders = vars(value).get("_can_record_outputs")
                if isinstance(recorders, dict):
                    state[module_name, name, "recorders"] = _recorders(recorders)
    if "transformers.monkey_patching" in sys.modules:
        registry = sys.modules["transformers.monkey_patching"]._monkey_patch_mapping_cache
        state["registry",] = tuple(registry.items())
    if (utils := sys.modules.get("transformers.modeling_utils")) is not None:
        state["hooks",] = (utils.apply_patches, utils.patch_output_recorders)
        # What transformers itself replaces for the time of a load, and loses when loads overlap.
        state["stand-ins",] = (utils.PreTrainedModel.tie_weights, torch.linspace)
        state["post_init",] = vars(utils.PreTrainedModel)["post_init"]
    if (conversion := sys.modules.get("transformers.conversion_mapping")) is not None:
        state["user conversions",] = frozenset(conversion.USER_REGISTERED_MAPPINGS)
        state["conversion look-up",] = conversion.get_checkpoint_conversion_mapping
        for name, items in (conversion._checkpoint_conversion_mapping_cache or {}).items():
            state["conversion", name] = id(items)
    if (capturing := sys.modules.get("transformers.utils.output_capturing")) is not None:
        for name, recorders in list(dict.items(capturing._CAN_RECORD_REGISTRY)):
            state["recorders", name] = _names(recorders)
    return state


def changed(before: dict[tuple, object], after: dict[tuple, object]) -> list[str]:
    """What differs; what an import or the first model of a class adds is no difference."""
    return sorted(
        f"{'.'.join(map(str, what))}: {before[what]!r} → {after.get(what, NOTHING)!r}"
        for what in before
        if before[what] != after.get(what, NOTHING)
    )


def _recorders(recorders: dict) -> tuple:
    return tuple(
        (name, id(spec), getattr(spec, "target_class", None)) for name, spec in recorders.items()
    )


def _names(recorders: object) -> object:
    """Name what recorders look for: a file that ran again has equal ones, and a patch has not."""
    if not isinstance(recorders, dict):
        return recorders
    specs = {
        name: found if isinstance(found, list | tuple) else [found]
        for name, found in recorders.items()
    }
    return {
        name: [str(getattr(spec, "target_class", spec)) for spec in found]
        for name, found in specs.items()
    }
