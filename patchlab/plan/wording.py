"""How findings word what they list and call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import nn


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Write some names: "A", "A and B", "A, B and C", "A, B, C and 4 more"."""
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit:,} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def signature_of(function: Any) -> inspect.Signature | None:
    """Return a function's signature without `self`, None where Python cannot tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:]) if parameters else signature


def constructor_parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a constructor's parameters, stars included."""
    return _names(signature_of(cls.__init__))


def forward_parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of `forward`'s parameters, stars included."""
    return _names(signature_of(cls.forward))


def takes_any_keyword(cls: type[nn.Module]) -> bool:
    """Tell whether `forward` has a `**kwargs`."""
    signature = signature_of(cls.forward)
    return signature is not None and any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()
    )


def named_parameters(names: Sequence[str]) -> list[str]:
    """Return the names that an argument can be given by."""
    return [name for name in names if not name.startswith("*")]


def needs_values(error: str) -> bool:
    """Tell whether an error is one of the meta device, on which tensors have no values.

    Torch has no one class for it: `.item()` raises a RuntimeError, `.nonzero()` a
    NotImplementedError, `.numpy()` a TypeError, and a tensor of another device a RuntimeError
    (torch 2.13.0). All of them name the device.
    """
    return re.search(r"(?i)(?<![a-z])meta(?![a-z])", error) is not None


def _names(signature: inspect.Signature | None) -> tuple[str, ...]:
    if signature is None:
        return ()
    kinds = inspect.Parameter
    stars: dict[object, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    return tuple(stars.get(p.kind, "") + p.name for p in signature.parameters.values())
