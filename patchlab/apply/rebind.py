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
# Names that led to a replacement before any block bound it, by the open block that found them.
_led_there: dict[PatchMapping, set[tuple[int, str]]] = {}


@contextmanager
def rebound(mapping: PatchMapping) -> Iterator[None]:
    """Bind the names that a mapping matches to its replacements, inside the block."""
    entered = PatchMapping(mapping.rules)  # its identity is the block's
    try:
        with _LOCK:
            _led_there[entered] = _names_of_replacements(entered)
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
        _led_there.pop(entered, None)


def _synchronize() -> None:
    """Bring the names to what the open blocks want; may be interrupted anywhere and run again."""
    wanted: dict[tuple[int, str], ClassBinding] = {}
    for mapping in _stack:
        for binding in _matched_bindings(mapping):
            wanted[id(binding.python_module), binding.name] = binding
    closed = [binding for at, binding in _bindings.items() if at not in wanted]
    for binding in closed:
        _put_back(binding)
    if closed:
        _sweep(closed)
    for binding in closed:
        del _bindings[id(binding.python_module), binding.name]
    for at, binding in wanted.items():
        known = _bindings.get(at)
        if known is None or known.bound is not binding.bound:
            if known is not None:
                _put_back(known)
            _bindings[at] = binding  # first: an interrupt before the next line is then put back
            setattr(binding.python_module, binding.name, binding.bound)


def _bound_classes() -> Iterator[tuple[ModuleType, str, type[nn.Module]]]:
    """Yield every name in the loaded Python modules of transformers that leads to a module class.

    vars(), not dir() and getattr(): reading a name off a lazy module imports the file behind it.
    """
    for name, python_module in list(sys.modules.items()):
        if is_transformers_name(name) and isinstance(python_module, ModuleType):
            for attribute, value in list(vars(python_module).items()):
                if isinstance(value, type) and issubclass(value, nn.Module):
                    yield python_module, attribute, value


def _names_of_replacements(mapping: PatchMapping) -> set[tuple[int, str]]:
    """Return the names that lead to a replacement although no block has bound it yet."""
    elsewhere = {rule.replacement for other in _stack for rule in other}
    replacements = {rule.replacement for rule in mapping} - elsewhere
    return {(id(m), name) for m, name, value in _bound_classes() if value in replacements}


def _matched_bindings(mapping: PatchMapping) -> Iterator[ClassBinding]:
    originals = {(b.name, b.bound): b.original for b in _bindings.values()}
    for python_module, name, value in _bound_classes():
        known = _bindings.get((id(python_module), name))
        if known is not None and value is known.bound:
            original = known.original
        elif (id(python_module), name) in _led_there[mapping]:
            original = value
        else:  # a copy that was made inside a block leads where the name it was copied from leads
            original = originals.get((name, value), value)
        # By the name itself, as transformers does, whosever class it leads to; and where a class
        # of transformers is bound under an alias, by the name of the class.
        rule = mapping.find(name)
        if rule is None and is_transformers_name(getattr(original, "__module__", None)):
            rule = mapping.find(original.__name__)
        if rule is not None and rule.replacement is not original:
            yield ClassBinding(python_module, name, original, rule.replacement)


def _put_back(binding: ClassBinding) -> None:
    if vars(binding.python_module).get(binding.name) is binding.bound:
        setattr(binding.python_module, binding.name, binding.original)


def _sweep(closed: list[ClassBinding]) -> None:
    """Put back the names that copied a binding while it was there.

    A file first imported inside the block (`from .modeling_llama import LlamaMLP`), or a lazy
    module that was asked for the name, got the replacement and keeps it.
    """
    by_name = {(binding.name, binding.bound): binding.original for binding in closed}
    by_class: dict[type, set[type[nn.Module]]] = {}
    for binding in closed:
        by_class.setdefault(binding.bound, set()).add(binding.original)
    led_there: set[tuple[int, str]] = set().union(*_led_there.values())
    for python_module, name, value in _bound_classes():
        at = (id(python_module), name)
        if value not in by_class or at in _bindings or at in led_there:
            continue
        originals = by_class[value]
        original = by_name.get((name, value))
        if original is None and len(originals) == 1:  # copied under an alias
            (original,) = originals
        if original is not None:
            setattr(python_module, name, original)


def is_rebound(python_module: ModuleType, name: str) -> bool:
    """Tell whether a name is bound to a replacement by a block that is open now."""
    binding = _bindings.get((id(python_module), name))
    return binding is not None and vars(python_module).get(name) is binding.bound
