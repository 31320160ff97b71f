"""Weights that accelerate keeps elsewhere, in memory or on disk, and brings for each forward.

Such a tensor is on the meta device, and a hook of the module it belongs to holds the values by
name (accelerate 1.15.0, `AlignDevicesHook`). The hook follows to a new module that has tensors of
just those names, and brings them there; nothing is loaded for a swap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from patchlab.apply.swap_build import Built
from patchlab.apply.tensor_names import joined, parts_of
from patchlab.errors import SwapError

HOOK = "_hf_hook"


def supplied_names(parts: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the names of the tensors that hooks bring for the forward of these modules."""
    return frozenset(
        joined(path, name)
        for path, part in parts.items()
        if HOOK in vars(part)
        for hook in _offloading(vars(part)[HOOK])
        for name in _asked(hook, part)
    )


def check_supply(built: Built) -> None:
    """Refuse a new module whose forward would ask its hook for tensors that this has not.

    Raises:
        SwapError: There is such a tensor.
    """
    hooked = {path: old for path, old in built.old_parts.items() if HOOK in vars(old)}
    new_parts = parts_of(built.module) if hooked else {}
    for path, old in hooked.items():
        new = new_parts.get(path)
        if new is None or new is old:
            continue
        for hook in _offloading(vars(old)[HOOK]):
            known = set(_asked(hook, old))
            for name in _asked(hook, new):
                if name not in known:
                    raise SwapError(
                        f"{joined(joined(built.site.fqn, path), name)} would be new, and the "
                        f"weights there are offloaded by accelerate, which has none of that name "
                        f"to bring. Swap before the model is offloaded (dispatch_model), or load "
                        f"it under patchlab.patched with the same mapping."
                    )


def carry_accelerate(old: nn.Module, new: nn.Module) -> bool:
    """Let accelerate's hook run around the new module's forward; return whether it will."""
    try:
        from accelerate.hooks import ModelHook, add_hook_to_module  # type: ignore[import-untyped]
    except ImportError:
        return False
    # A hook moves weights when it is added to a module. Those here are where it wants them, so a
    # bare one takes the call, and the wrapped forward asks for `_hf_hook` each time.
    add_hook_to_module(new, ModelHook())
    vars(new)[HOOK] = vars(old)[HOOK]
    return True


def _offloading(hook: Any) -> Iterator[Any]:
    """Yield the hooks that bring weights, out of a sequence of hooks too."""
    for inner in getattr(hook, "hooks", ()):
        yield from _offloading(inner)
    if getattr(hook, "offload", False) and hasattr(hook, "weights_map"):
        yield hook


def _asked(hook: Any, module: nn.Module) -> Iterator[str]:
    """Yield the names that a hook asks for, as `named_module_tensors` does for it."""
    parts = parts_of(module) if hook.place_submodules else {"": module}
    for path, part in parts.items():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield joined(path, name)
        for name, buffer in part._buffers.items():
            kept = name in part._non_persistent_buffers_set
            if buffer is not None and hook.offload_buffers and not kept:
                yield joined(path, name)
