"""The only file that touches transformers' private names, and knows how its versions differ.

Checked on transformers 5.22.2, 5.23.0 and 5.24.0. Each function names the file and the name it
relies on. Importing this file imports transformers' root package and torch, and no modeling code;
everything else is looked up when it is called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

PACKAGE = "transformers"


def is_transformers_name(python_module: str | None) -> bool:
    """Tell whether a Python module is transformers or lies below it.

    transformers' own test is `startswith("transformers")`, which `transformers_modules` (remote
    code) and any package with such a name pass as well.
    """
    return python_module is not None and (
        python_module == PACKAGE or python_module.startswith(PACKAGE + ".")
    )


# --- the patch registry: transformers/monkey_patching.py -----------------------------------------


def registered_patches() -> dict[str, type[nn.Module]]:
    """Return a copy of transformers' registry; copying a dict is one step, and needs no lock."""
    monkey_patching = importlib.import_module("transformers.monkey_patching")
    return dict(monkey_patching._monkey_patch_mapping_cache)


@contextmanager
def patch_registry() -> Iterator[dict[str, type[nn.Module]]]:
    """Hold transformers' lock and yield the very dict that is its registry.

    `_monkey_patch_mapping_cache` under `_monkey_patch_lock`. Whatever is decided from the dict and
    written to it in one `with` block is one step for every other thread.
    """
    monkey_patching = importlib.import_module("transformers.monkey_patching")
    with monkey_patching._monkey_patch_lock:
        yield monkey_patching._monkey_patch_mapping_cache


# --- where patches enter a build: transformers/modeling_utils.py ---------------------------------

# `_from_config` and `get_init_context` call the first, both callers the second, by these global
# names.
BUILD_NAMES = ("apply_patches", "patch_output_recorders")


def modeling_utils() -> ModuleType:
    """Return `transformers.modeling_utils`, importing it if nothing has yet."""
    return importlib.import_module("transformers.modeling_utils")


def own_build_function(name: str) -> Callable[..., Any]:
    """Return transformers' own function for one of `BUILD_NAMES`."""
    function: Callable[..., Any] = getattr(
        importlib.import_module("transformers.monkey_patching"), name
    )
    return function


def pretrained_model_class() -> type[nn.Module]:
    """Return `transformers.PreTrainedModel`."""
    cls: type[nn.Module] = modeling_utils().PreTrainedModel
    return cls


# `PreTrainedModel`'s method that a load and a `post_init` call for each module (modeling_utils.py).
INITIALIZE = "_initialize_weights"


def initialize_module(model: nn.Module, module: nn.Module) -> None:
    """Run a model's own initializer, `PreTrainedModel._init_weights`, on one module of it."""
    model._init_weights(module)  # type: ignore[operator]


# --- weight conversions: transformers/conversion_mapping.py --------------------------------------


def conversion_module() -> ModuleType:
    """Return `transformers.conversion_mapping`."""
    return importlib.import_module("transformers.conversion_mapping")


def conversion_cache() -> dict[str, Any]:
    """Return the dict of registered conversions, built first if nothing has asked for it yet."""
    module = conversion_module()
    if module._checkpoint_conversion_mapping_cache is None:
        module.get_checkpoint_conversion_mapping("")
    cache: dict[str, Any] = module._checkpoint_conversion_mapping_cache
    return cache


def loaded_conversion_cache() -> dict[str, Any] | None:
    """Return the dict of registered conversions if it has been built, and import nothing."""
    module = sys.modules.get("transformers.conversion_mapping")
    return None if module is None else module._checkpoint_conversion_mapping_cache


def user_conversions() -> set[str]:
    """Return the set of model types and class names whose conversion the user registered."""
    names: set[str] = conversion_module().USER_REGISTERED_MAPPINGS
    return names


def conversion_lookups() -> list[tuple[ModuleType, str]]:
    """List the loaded Python modules that look conversions up by name, with that name.

    `get_checkpoint_conversion_mapping` is called through the globals of `conversion_mapping`
    itself, and through its own imports of `fusion_mapping` and `integrations.hub_kernels`.
    """
    name = "get_checkpoint_conversion_mapping"
    found = [(conversion_module(), name)]
    for other in ("transformers.fusion_mapping", "transformers.integrations.hub_kernels"):
        module = sys.modules.get(other)
        if module is not None and name in vars(module):
            found.append((module, name))
    return found


# --- output recorders: transformers/utils/output_capturing.py ------------------------------------

_RECORDER_LOCK = threading.RLock()
_OVERLAID: dict[str, Any] = {}
_MISSING = object()


def recorder_registry() -> dict[str, Any]:
    """Return `_CAN_RECORD_REGISTRY`, to be read and written with `dict`'s own methods.

    5.22: a plain dict keyed by `str(cls)`. From 5.23: a subclass whose methods take a model.
    """
    module = importlib.import_module("transformers.utils.output_capturing")
    registry: dict[str, Any] = module._CAN_RECORD_REGISTRY
    return registry


def output_recorder_class() -> type:
    """Return `OutputRecorder`."""
    module = importlib.import_module("transformers.utils.output_capturing")
    cls: type = module.OutputRecorder
    return cls


def use_instance_recorders() -> None:
    """Let models that carry recorders of their own install the hooks for those.

    transformers looks recorders up by class, so a patched and an unpatched model of one class
    cannot differ. This wraps `install_all_output_capturing_hooks`, which runs once for each model:
    where an instance has `_can_record_outputs` in its own `__dict__`, the registry shows that one
    for the time of the call. Models without it are untouched, so the wrapper, once needed, stays: a
    copy or an unpickled patched model needs it just as much, and nothing tells us of those.
    """
    module = importlib.import_module("transformers.utils.output_capturing")
    real = module.install_all_output_capturing_hooks
    if getattr(real, "_patchlab_instance_recorders", False):
        return

    def install_all_output_capturing_hooks(model: Any, prefix: str | None = None) -> Any:
        own = vars(model).get("_can_record_outputs")
        name = str(type(model))
        if own is None and name not in _OVERLAID:
            return real(model, prefix)
        with _RECORDER_LOCK:
            registry = module._CAN_RECORD_REGISTRY
            outer = dict.get(registry, name, _MISSING)
            first = name not in _OVERLAID
            if first:
                _OVERLAID[name] = outer
            try:
                dict.__setitem__(registry, name, own if own is not None else _OVERLAID[name])
                return real(model, prefix)
            finally:
                if outer is _MISSING:
                    dict.pop(registry, name, None)
                else:
                    dict.__setitem__(registry, name, outer)
                if first:
                    del _OVERLAID[name]

    install_all_output_capturing_hooks.__wrapped__ = real  # type: ignore[attr-defined]
    vars(install_all_output_capturing_hooks)["_patchlab_instance_recorders"] = True
    vars(module)["install_all_output_capturing_hooks"] = install_all_output_capturing_hooks


# --- where a module came from --------------------------------------------------------------------


def source_of_module(module: ModuleType) -> str:
    """Return the source text of a Python module, "" where there is none to read."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


# --- gradient checkpointing and beam search: what routing has to know of -------------------------


def checkpointing_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """List those modules that carry a function for gradient checkpointing, enabled or not.

    `PreTrainedModel._set_gradient_checkpointing` (modeling_utils.py) puts one into the `__dict__`
    of every module that has a `gradient_checkpointing` flag; `GradientCheckpointingLayer`
    (modeling_layers.py) calls it with the layer's forward and its arguments.
    """
    # Not hasattr on the module, which takes torch 2 µs and an error for each that has none.
    name = "gradient_checkpointing"
    return [module for module in modules if name in vars(module) or hasattr(type(module), name)]


def checkpoint_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function a module checkpoints its forward with; None if it has none of its own."""
    return vars(module).get("_gradient_checkpointing_func")


def set_checkpoint_function(module: nn.Module, function: Callable[..., Any]) -> None:
    """Give a module another function to checkpoint its forward with."""
    vars(module)["_gradient_checkpointing_func"] = function


def beam_reorder(module: nn.Module) -> Callable[..., Any] | None:
    """Return the model's `_reorder_cache`; `generate` asks for it before it asks the cache."""
    function: Callable[..., Any] | None = getattr(module, "_reorder_cache", None)
    return function


def set_beam_reorder(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let `generate` reorder this very model's cache with another function."""
    vars(module)["_reorder_cache"] = function


def restore_beam_reorder(module: nn.Module, function: Callable[..., Any]) -> None:
    """Take back what `set_beam_reorder` set, unless somebody has replaced it since."""
    if vars(module).get("_reorder_cache") is function:
        del vars(module)["_reorder_cache"]


@contextmanager
def string_keyed_recorders() -> Iterator[None]:
    """Let `_CAN_RECORD_REGISTRY` be read and written by `str(cls)` inside a block.

    The transformers guide to monkey patching does so. From 5.23 the registry's methods take a
    model: `get(key, {})` is then a TypeError, and an entry written under a string is stored under
    the string's own class. Entries written in the block stay; 5.22 needs nothing.
    """
    registry = recorder_registry()
    if type(registry) is dict:
        yield
        return
    block = object()
    try:
        with _RECORDER_LOCK:
            own = next(iter(_STRING_KEYED.values()), type(registry))
            _STRING_KEYED[block] = own
            registry.__class__ = _string_keyed(own)
        yield
    finally:
        with _RECORDER_LOCK:
            first = _STRING_KEYED.pop(block, None)
            if first is not None and not _STRING_KEYED:
                registry.__class__ = first


# The open blocks of `string_keyed_recorders`, each with the registry's own class.
_STRING_KEYED: dict[object, type] = {}


def _string_keyed(own: Any) -> type:
    def get(self: dict[str, Any], key: Any, *default: Any) -> Any:
        if isinstance(key, str):
            return dict.get(self, key, *default)
        return own.get(self, key)

    def set_item(self: dict[str, Any], key: Any, value: Any) -> None:
        if isinstance(key, str):
            dict.__setitem__(self, key, value)
        else:
            own.__setitem__(self, key, value)

    return type("StringKeyedRegistry", (own,), {"get": get, "__setitem__": set_item})


# --- weight transforms: transformers/core_model_loading.py, conversion_mapping.py -----------------


def weight_transforms(model: nn.Module, *, legacy: bool = True) -> list[Any]:
    """List what `from_pretrained` would push the keys of a checkpoint of this model through.

    `get_model_conversion_mapping`; `legacy` adds the old names (`gamma`, `beta`) that every load
    understands and no save writes.
    """
    transforms: list[Any] = conversion_module().get_model_conversion_mapping(
        model, add_legacy=legacy
    )
    return transforms


def saved_transforms(model: nn.Module) -> list[Any]:
    """List the transforms that `save_pretrained` would reverse for this model, as it does.

    `revert_weight_conversion`: those that matched when the model was loaded, else those registered
    for it without changes of prefix.
    """
    own: list[Any] | None = getattr(model, "_weight_conversions", None)
    if own is not None:
        return own
    return [t for t in weight_transforms(model, legacy=False) if not is_prefix_change(t)]


def is_prefix_change(transform: Any) -> bool:
    """Tell the change of a prefix, of which a save knows only if the load has made it."""
    loading = importlib.import_module("transformers.core_model_loading")
    return isinstance(transform, loading.PrefixChange)


def is_converter(transform: Any) -> bool:
    """Tell a `WeightConverter`, which changes tensors, from a renaming."""
    loading = importlib.import_module("transformers.core_model_loading")
    return isinstance(transform, loading.WeightConverter)


def rename_checkpoint_key(
    key: str, renamings: list[Any], converters: list[Any], prefix: str | None, state: Any
) -> tuple[str, str | None]:
    """Push one key of a checkpoint through renamings and at most one converter.

    Returns:
        The key in the model, and the source pattern of the converter that matched, if one did.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    renamed: tuple[str, str | None] = loading.rename_source_key(
        key, renamings, converters, prefix, state
    )
    return renamed


def revert_conversions(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Bring tensors under the names and in the layout that `save_pretrained` would write."""
    loading = importlib.import_module("transformers.core_model_loading")
    reverted: dict[str, Any] = loading.revert_weight_conversion(model, state)
    return reverted


def expected_keys(
    model: nn.Module, missing: set[str], unexpected: set[str]
) -> tuple[set[str], set[str]]:
    """Leave out of missing and unexpected keys what a load of this model is silent about.

    `PreTrainedModel._adjust_missing_and_unexpected_keys`, and the keys of tied weights.
    """
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    # A root that is replaced by no model of transformers has no such method.
    adjust: Any = getattr(model, "_adjust_missing_and_unexpected_keys", None)
    if adjust is not None:
        adjust(info)
    return info.missing_keys, info.unexpected_keys


def tied_keys(model: nn.Module) -> dict[str, str]:
    """Return tied key → the key whose weight it takes, as `post_init` worked it out."""
    keys: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return keys


def own_conversions() -> dict[str, Any]:
    """Return the conversions that transformers ships, whatever has been registered since."""
    built: dict[str, Any] = conversion_module()._build_checkpoint_conversion_mapping()
    return built


def conversion_of(name: str) -> list[Any] | None:
    """Return the conversion registered for a model type or class name, as this context has it."""
    found: list[Any] | None = conversion_module().get_checkpoint_conversion_mapping(name)
    return found


def written_patterns(transform: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the source and target patterns that a `WeightTransform` was made with.

    Its constructor rewrites `source_patterns` and `target_patterns` (capturing groups, anchors) and
    keeps what was given in `_original_source_patterns` and `_original_target_patterns`.
    """
    sources: list[str] = transform._original_source_patterns
    targets: list[str] = transform._original_target_patterns
    return tuple(sources), tuple(targets)
