"""Constructors that cannot bind, told from two signatures alone, without a model.

`contract.constructors` judges the calls that a model really makes. A scope opens before any is
known; what it can say is that no call fits both signatures. That is rare and then certain.
"""

from __future__ import annotations

import inspect

from torch import nn

from patchlab.mapping.rules import PatchMapping
from patchlab.model.classes import matched_classes
from patchlab.plan.findings import Finding, ordered
from patchlab.plan.wording import constructor_parameters, signature_of

_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def loaded_mismatches(mapping: PatchMapping) -> tuple[Finding, ...]:
    """Return a PL201 for each rule whose replacement can be built in no place that is loaded.

    A pattern may fit classes that will never be built; as long as one of them is built in a way
    that the replacement takes, nothing is said.
    """
    fitting: dict[str, list[type[nn.Module]]] = {}
    for cls, rule in matched_classes(mapping).items():
        fitting.setdefault(rule.key, []).append(cls)
    found = []
    for rule in mapping:
        originals = fitting.get(rule.key, [])
        if originals and not any(_can_bind(cls, rule.replacement) for cls in originals):
            first = min(originals, key=lambda cls: cls.__name__)
            name = rule.replacement.__name__
            ours = ", ".join(constructor_parameters(rule.replacement))
            theirs = ", ".join(constructor_parameters(first))
            found.append(
                Finding(
                    "PL201",
                    "error",
                    rule.key,
                    first.__name__,
                    f"{first.__name__} is built with ({theirs}); {name} takes ({ours}), and no "
                    f"call fits both. Give {name}.__init__ the same parameters.",
                )
            )
    return ordered(found)


def _can_bind(original: type[nn.Module], replacement: type[nn.Module]) -> bool:
    """Tell whether some call fits the constructors of both, by the number of arguments."""
    theirs, ours = signature_of(original.__init__), signature_of(replacement.__init__)
    if theirs is None or ours is None:
        return True
    return _required(ours) <= _most(theirs) and _required(theirs) <= _most(ours)


def _required(signature: inspect.Signature) -> int:
    parameters = signature.parameters.values()
    return sum(p.default is p.empty and p.kind not in _STARS for p in parameters)


def _most(signature: inspect.Signature) -> float:
    parameters = signature.parameters.values()
    return float("inf") if any(p.kind in _STARS for p in parameters) else len(parameters)
