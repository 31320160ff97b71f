"""What is wrong with a checkpoint and a patched model, in findings PL301 to PL305."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from patchlab._upstream import (
    conversion_of,
    own_conversions,
    pretrained_model_class,
    user_conversions,
)
from patchlab.apply.transforms import carry_forward, signature
from patchlab.apply.uninitialized import METHOD
from patchlab.plan.findings import Finding, Severity
from patchlab.plan.wording import listed
from patchlab.verify.checkpoint_files import StoredTensor
from patchlab.verify.checkpoint_keys import Loading, meta_tensor
from patchlab.verify.reversibility import Reversal

if TYPE_CHECKING:
    from patchlab.verify.checkpoint import ClassWeights

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def key_findings(loading: Loading, classes: Iterable[ClassWeights]) -> list[Finding]:
    """Tell of keys outside of replaced classes, shapes that differ, operations that raise."""
    inside: set[str] = set()
    for item in classes:
        inside.update(item.initialized, item.random, item.uninitialized, item.dropped)
    found = _none_fits(loading) + _other_kinds(loading)
    missing = [key for key in loading.missing if key not in inside]
    unexpected = [key for key in loading.unexpected if key not in inside]
    if missing:
        message = f"the checkpoint has nothing for {_listed(missing)}, outside of what is replaced."
        found.append(Finding("PL301", "warning", "", missing[0], message))
    if unexpected:
        has = "has" if len(unexpected) == 1 else "have"
        message = f"{_listed(unexpected)} of the checkpoint {has} no place in the model."
        found.append(Finding("PL301", "warning", "", unexpected[0], message))
    if loading.mismatched:
        first = loading.mismatched[0]
        more = len(loading.mismatched) - 1
        message = f"shapes differ: {first}{f', and {more} more' if more else ''}."
        found.append(Finding("PL301", "error", "", first.key, message))
    for key, problem in loading.failed[:1]:
        more = len(loading.failed) - 1
        message = (
            f"the conversion that makes {key} raised {problem}"
            f"{f', and {more} more did' if more else ''}. It was run on tensors of the meta "
            f"device; one that needs values cannot be checked here."
        )
        found.append(Finding("PL301", "error", "", key, message))
    return found


# What wrappers put before every key, with what saved it so.
_WRAPPED = {
    "module.": "nn.DataParallel or DistributedDataParallel",
    "_orig_mod.": "a model that torch.compile returned",
    "base_model.model.": "an adapter of PEFT, to be loaded on top of its base model",
    "_forward_module.": "a training framework",
}


def _none_fits(loading: Loading) -> list[Finding]:
    """Tell of a checkpoint of which nothing has a place: one of another model, or wrapped."""
    if loading.loaded or loading.converted or not loading.missing:
        return []
    keys = list(loading.carried.unexpected)
    message = "nothing of the checkpoint has a place in the model: it is that of another model."
    for prefix, told in _WRAPPED.items():
        if keys and all(key.startswith(prefix) for key in keys):
            message = (
                f"nothing of the checkpoint has a place in the model: every key begins with "
                f"{prefix!r}, as {told} saves it. Save the model inside of the wrapper."
            )
    if not keys:
        message = "the checkpoint holds no tensors."
    return [Finding("PL301", "error", "", keys[0] if keys else "", message)]


def _other_kinds(loading: Loading) -> list[Finding]:
    """Tell of whole numbers where the model has fractions, as a quantizer stores them."""
    wrong = [
        key
        for key in loading.loaded
        if (made := loading.carried.made.get(key)) is not None
        and made.tensor.is_floating_point() != loading.state[key].is_floating_point()
    ]
    if not wrong:
        return []
    key = min(wrong)
    stored = loading.carried.made[key].tensor.dtype
    message = (
        f"{_listed(sorted(wrong))} {_are(wrong)} stored as {stored}, where the model has "
        f"{loading.state[key].dtype}: a load turns the one into the other number by number. Is the "
        f"checkpoint quantized, and its config without a quantization_config?"
    )
    return [Finding("PL301", "warning", "", key, message)]


def quantized_findings(config: Any) -> list[Finding]:
    """Tell of a quantizer, which puts classes and keys of its own into a model as it is loaded."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return []
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    name = str(getattr(method, "value", method))
    message = (
        f"the checkpoint is quantized ({name}): as it is loaded, the quantizer puts layers of its "
        f"own into the model, in replaced modules too. They are not built here, so missing and "
        f"unexpected keys of such layers are told which a load has not. A conversion that fuses "
        f"weights cannot fuse quantized ones."
    )
    return [Finding("PL301", "warning", "", name, message)]


def class_findings(classes: Iterable[ClassWeights], model: nn.Module) -> list[Finding]:
    """Tell of parameters of a replacement that the checkpoint lacks, and of weights it drops."""
    found = []
    for item in classes:
        name = item.replacement
        if item.uninitialized:
            message = (
                f"{_listed(item.uninitialized)} of {name} {_are(item.uninitialized)} not in the "
                f"checkpoint, and nothing initializes {_them(item.uninitialized)}: uninitialized "
                f"memory after from_pretrained, which says 'newly initialized'. Give {name} a "
                f"method {METHOD}(self) that sets {_them(item.uninitialized)} with "
                f"transformers.initialization, or a weight conversion."
            )
            found.append(Finding("PL301", "error", item.key, name, message))
        if item.random:
            # A quantizer's layers are not built here, and have other keys for the same weights.
            quantized = bool(quantized_findings(getattr(model, "config", None)))
            severity: Severity = "error" if item.dropped and not quantized else "warning"
            message = (
                f"{_listed(item.random)} of {name} {_are(item.random)} not in the "
                f"checkpoint and will be newly initialized, at random for the most part."
            )
            if item.dropped:
                message += " The weights of the original went nowhere: a conversion is missing."
            found.append(Finding("PL301", severity, item.key, name, message))
        if item.dropped:
            severity = "error" if item.uninitialized else "warning"
            message = (
                f"{_listed(item.dropped)} of the checkpoint {_are(item.dropped)} dropped: "
                f"{item.original} takes {_them(item.dropped)}, {name} does not. If it should, use "
                f"the old names or give a weight conversion."
            )
            found.append(Finding("PL301", severity, item.key, name, message))
    return found


def constant_findings(classes: Iterable[ClassWeights]) -> list[Finding]:
    """Tell of buffers and plain tensors that are computed in the constructor and lost by a load."""
    return [
        Finding(
            "PL303",
            "error",
            item.key,
            item.replacement,
            f"{_listed(item.constants)} of {item.replacement} {_are(item.constants)} computed in "
            f"the constructor, which from_pretrained runs on the meta device: the "
            f"{'values are' if len(item.constants) > 1 else 'value is'} lost. Set "
            f"{_them(item.constants)} in a method {METHOD}(self) with transformers.initialization; "
            f"a plain tensor must be a buffer for that.",
        )
        for item in classes
        if item.constants
    ]


def reversal_findings(reversals: list[tuple[Any, Reversal]]) -> list[Finding]:
    """Tell of conversions whose reverse does not give back what was loaded."""
    shipped = {
        signature(transform)
        for transforms in own_conversions().values()
        if isinstance(transforms, list)
        for transform in transforms
    }
    found = []
    for converter, reversal in reversals:
        if reversal.ok:
            continue
        plain = signature(converter)[:-1]
        severity: Severity = "warning" if any(known[:-1] == plain for known in shipped) else "error"
        message = (
            f"the conversion {reversal.name} does not reverse: {reversal.problem}. The model "
            f"loads, and save_pretrained would write a corrupt checkpoint."
        )
        if any(operation.startswith("Concatenate(") for operation in reversal.operations):
            message += (
                " Concatenate reverses into equal parts; patchlab.concatenate_by_config splits by "
                "the sizes in the config."
            )
        found.append(Finding("PL302", severity, "", reversal.targets[0], message))
    return found


def conversion_findings(
    model: nn.Module,
    tensors: Mapping[str, StoredTensor],
    loading: Loading,
    transforms: list[Any],
    conversions: Mapping[str, list[Any]],
) -> list[Finding]:
    """Tell of conversions that took the place of others, are shadowed, or match nothing."""
    shipped = own_conversions()
    pretrained = pretrained_model_class()
    identifiers: dict[str, set[str]] = {}
    for module in model.modules():
        if isinstance(module, pretrained):
            model_type = getattr(module.config, "model_type", None) or ""
            identifiers.setdefault(type(module).__name__, set()).add(model_type)
    names = set(identifiers) | {name for types in identifiers.values() for name in types}
    by_user = (set(conversions) | user_conversions()) & names
    found = []
    for name in sorted(by_user):
        found += _lost(name, shipped, model, tensors, loading)
    for class_name, model_types in sorted(identifiers.items()):
        if conversion_of(class_name) is None:
            continue
        for model_type in sorted(model_types & by_user):
            message = (
                f"conversions are given for the model type {model_type!r}, but the class name "
                f"{class_name!r} has conversions of its own, which come first: those given are not "
                f"used for it. Give them for {class_name!r}."
            )
            found.append(Finding("PL305", "error", "", model_type, message))
    for name in sorted(set(conversions) - names):
        message = (
            f"conversions are given for {name!r}, and the model has no such model type or class. "
            f"It has {_listed(sorted(filter(None, names)))}."
        )
        found.append(Finding("PL305", "warning", "", name, message))
    given = {signature(t)[:-1] for name in by_user for t in conversions.get(name, ())}
    for transform in transforms:
        if signature(transform)[:-1] in given and not transform.was_used():
            message = (
                f"the conversion {', '.join(transform.source_patterns)} → "
                f"{', '.join(transform.target_patterns)} matches no key of the checkpoint."
            )
            found.append(Finding("PL305", "warning", "", transform.target_patterns[0], message))
    return found


def _lost(
    name: str,
    shipped: Mapping[str, Any],
    model: nn.Module,
    tensors: Mapping[str, StoredTensor],
    loading: Loading,
) -> list[Finding]:
    """Tell of transformers' own conversions that are gone and would have filled missing keys."""
    own = shipped.get(name)
    missing = set(loading.missing)
    if not isinstance(own, list) or not missing:
        return []
    now = {signature(transform)[:-1] for transform in conversion_of(name) or ()}
    gone = [transform for transform in own if signature(transform)[:-1] not in now]
    if not gone:
        return []
    metas = {key: meta_tensor(tensors[key]) for key in loading.unexpected}
    carried = carry_forward(metas, gone, model, loading.state)
    filled = [key for key in carried.made if key in missing]
    if not filled:
        return []
    return [
        Finding(
            "PL305",
            "error",
            "",
            name,
            f"the conversions given for {name!r} take the place of transformers' own, without "
            f"which {_listed(filled)} {_are(filled)} missing. Keep both: from "
            f"transformers.conversion_mapping import get_checkpoint_conversion_mapping, then "
            f"conversions={{{name!r}: [*get_checkpoint_conversion_mapping({name!r}), ...]}}.",
        )
    ]


def _listed(keys: Iterable[str]) -> str:
    """List keys, those of different layers as one."""
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kinds.setdefault(_NUMBER.sub("*", key), []).append(key)
    shown = [
        members[0] if len(members) == 1 else f"{kind} ({len(members)})"
        for kind, members in kinds.items()
    ]
    return listed(shown)


def _are(keys: Iterable[str]) -> str:
    return "is" if len(list(keys)) == 1 else "are"


def _them(keys: Iterable[str]) -> str:
    return "it" if len(list(keys)) == 1 else "them"
