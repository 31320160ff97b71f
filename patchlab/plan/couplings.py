"""Couplings: names and base classes by which others know a class (PL109, PL204, PL304)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from patchlab.plan.evidence import Evidence
from patchlab.plan.findings import Finding, Severity
from patchlab.plan.plan import Replacement
from patchlab.plan.wording import listed
from patchlab.render.numbers import count

# What a class body holds without saying anything.
_BOILERPLATE = frozenset(
    {
        "__module__",
        "__qualname__",
        "__doc__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotations__",
        "__annotate_func__",
        "__annotations_cache__",
        "__parameters__",
    }
)


def only_forward(evidence: Evidence) -> Iterator[Finding]:
    """PL109: the replacement overrides `forward` alone, for which transformers has interfaces."""
    for replacement in evidence.plan:
        finding = only_forward_finding(
            replacement.key, replacement.original, replacement.replacement
        )
        if finding is not None:
            yield finding


def only_forward_finding(
    key: str, original: type[nn.Module], replacement: type[nn.Module]
) -> Finding | None:
    """PL109 for one replacement; None if it is no subclass or differs in more."""
    if _overridden(original, replacement) != {"forward"}:
        return None
    name = original.__name__
    if "Attention" in name:
        way = "the Attention interface (AttentionInterface.register)"
    elif "Experts" in name:
        way = "the Experts interface (ExpertsInterface.register)"
    else:
        way = "the Kernels registry (use_kernel_forward_from_hub)"
    return Finding(
        "PL109",
        "info",
        key,
        name,
        f"{replacement.__name__} differs from {name} in forward alone. If only the computation "
        f"changes, {way} does that without a patch.",
    )


def base_classes(evidence: Evidence) -> Iterator[Finding]:
    """PL204: a base class is lost by which others know the original."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    bases: list[tuple[type, str]] = [
        (GradientCheckpointingLayer, "gradient checkpointing skips it, without a word"),
    ]
    for replacement in evidence.plan:
        for base, what in bases:
            if issubclass(replacement.original, base) and not issubclass(
                replacement.replacement, base
            ):
                yield _coupling(
                    replacement,
                    f"{replacement.original.__name__} is a {base.__name__} and "
                    f"{replacement.replacement.__name__} is not: {what}. Subclass {base.__name__}.",
                )
        if "" in replacement.fqns and not issubclass(replacement.replacement, replacement.original):
            yield _coupling(
                replacement,
                f"{replacement.original.__name__} is the model itself, and "
                f"{replacement.replacement.__name__} is no subclass of it: loading, saving and "
                f"generating count on it. Subclass {replacement.original.__name__}.",
                severity="error",
            )


def names_others_list(evidence: Evidence) -> Iterator[Finding]:
    """PL204: a class name stands in a list by which models are split, and is no longer there."""
    listing = _no_split_names(evidence)
    remaining = {node.class_name for node in evidence.after.nodes} if evidence.after else set()
    for replacement in evidence.plan:
        name, new = replacement.original.__name__, replacement.replacement.__name__
        if name in listing and new not in listing and name not in remaining:
            split = count(len(replacement.fqns), "module")
            yield _coupling(
                replacement,
                f"{name} is in the model's _no_split_modules, and {new} is not: device_map and "
                f"FSDP wrap by this name, and would split {split}. Call the replacement {name} "
                f"too, or set model._no_split_modules.",
            )


def tied_weights(evidence: Evidence) -> Iterator[Finding]:
    """PL304: tied weights lie under a replaced module, and are not there any more."""
    tied = getattr(evidence.model, "all_tied_weights_keys", None)
    if evidence.after is None or not isinstance(tied, dict):
        return
    names = {
        f"{node.fqn}.{tensor.name}" if node.fqn else tensor.name
        for node in evidence.after.nodes
        for tensor in node.parameters
    }
    for replacement in evidence.plan:
        lost = [
            key
            for key in sorted({*tied, *tied.values()})
            if any(fqn and key.startswith(fqn + ".") for fqn in replacement.fqns)
            and key not in names
        ]
        if lost:
            yield Finding(
                "PL304",
                "error",
                replacement.key,
                replacement.original.__name__,
                f"the model ties {listed(lost)}, which {replacement.replacement.__name__} has not: "
                f"tying fails or the weight is lost. Keep the parameter's name.",
            )


def _no_split_names(evidence: Evidence) -> set[str]:
    found: set[str] = set()
    for fqn in evidence.sub_models:
        names: Any = getattr(evidence.before.find(fqn).cls, "_no_split_modules", None)
        found.update(names or ())
    return found


def _overridden(original: type, replacement: type) -> set[str]:
    """Return what a subclass of the original defines; empty if it is none."""
    if not issubclass(replacement, original):
        return set()
    own: set[str] = set()
    for cls in replacement.__mro__:
        if cls is original:
            break
        own |= {name for name, value in vars(cls).items() if _says_something(name, value)}
    return own


def _says_something(name: str, value: Any) -> bool:
    """Tell whether a class attribute can change more than what a forward of its own reads."""
    return name not in _BOILERPLATE and (name.startswith("_") or callable(value))


def _coupling(replacement: Replacement, message: str, severity: Severity = "warning") -> Finding:
    return Finding(
        "PL204",
        severity,
        replacement.key,
        replacement.original.__name__,
        message,
    )
