"""Opt-in: names in transformers' Python modules bound to the replacements for a block.

For code that must see the name change (`modeling_llama.LlamaMLP is MyMLP`). Names belong to the
process: every thread and task sees them, `isinstance` checks against them change their meaning, and
a dispatch dict that holds the original does not notice. The engine in `construct` runs beside this
and needs none of it.

Blocks may be left in any order. Bindings are computed from the stack of open blocks each time one
opens or closes, and a name is only put back if it still leads where we led it: what a third party
bound over ours stays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from patchlab._upstream import is_transformers_name
from patchlab.mapping.rules import PatchMapping


@dataclass(frozen=True, slots=True)
class ClassBinding:
    """A name in a Python module that is bound to a class."""

    python_module: ModuleType
    name: str
    original: type[nn.Module]
    bound: type[nn.Module]


_LOCK = threading.RLock()
_stack: list[PatchMapping] = []
_bindings: dict[tuple[int, str], ClassBinding] = {}


@contextmanager
def rebound(mapping: PatchMapping) -> Iterator[None]:
    """Bind the names that a mapping matches to its replacements, inside the block."""
    entered = PatchMapping(mapping.rules)  # its identity is the block's
    try:
        with _LOCK:
            _stack.append(entered)
            _synchronize()
        yield
    finally:
        leave(entered)


def leave(entered: PatchMapping) -> None:
    """Close one block; twice does no harm."""
    with _LOCK:
        _stack[:] = [mapping for mapping in _stack if mapping is not entered]
        _synchronize()


def _synchronize() -> None:
    """Bring the names to what the open blocks want; may be interrupted anywhere and run again."""
    wanted: dict[tuple[int, str], ClassBinding] = {}
    for mapping in _stack:
        for binding in _matched_bindings(mapping):
            wanted[id(binding.python_module), binding.name] = binding
    for at, binding in list(_bindings.items()):
        if at not in wanted:
            _put_back(binding)
            _sweep(binding)
            del _bindings[at]
    for at, binding in wanted.items():
        known = _bindings.get(at)
        if known is None or known.bound is not binding.bound:
            if known is not None:
                _put_back(known)
            _bindings[at] = binding  # first: an interrupt before the next line is then put back
            setattr(binding.python_module, binding.name, binding.bound)


def _matched_bindings(mapping: PatchMapping) -> Iterator[ClassBinding]:
    # vars(), not dir() and getattr(): reading a name off a lazy module imports the file behind it.
    for name, python_module in list(sys.modules.items()):
        if not is_transformers_name(name) or not isinstance(python_module, ModuleType):
            continue
        for attribute, value in list(vars(python_module).items()):
            known = _bindings.get((id(python_module), attribute))
            original = known.original if known is not None and value is known.bound else value
            if not isinstance(original, type) or not issubclass(original, nn.Module):
                continue
            rule = mapping.find(original.__name__)
            if rule is None or rule.replacement is original:
                continue
            if is_transformers_name(getattr(original, "__module__", None)):
                yield ClassBinding(python_module, attribute, original, rule.replacement)


def _put_back(binding: ClassBinding) -> None:
    if vars(binding.python_module).get(binding.name) is binding.bound:
        setattr(binding.python_module, binding.name, binding.original)


def _sweep(binding: ClassBinding) -> None:
    """Put back the same name in Python modules that copied it while it was bound.

    A file first imported inside the block (`from .modeling_llama import LlamaMLP`), or a lazy
    module that was asked for the name, got the replacement and keeps it.
    """
    for name, python_module in list(sys.modules.items()):
        if is_transformers_name(name) and isinstance(python_module, ModuleType):
            at = (id(python_module), binding.name)
            if vars(python_module).get(binding.name) is binding.bound and at not in _bindings:
                setattr(python_module, binding.name, binding.original)


def is_rebound(python_module: ModuleType, name: str) -> bool:
    """Tell whether a name is bound to a replacement by a block that is open now."""
    binding = _bindings.get((id(python_module), name))
    return binding is not None and vars(python_module).get(name) is binding.bound
