"""The `nn.Module` classes of the transformers modules that are loaded, found without importing any.

The classes are found through `__subclasses__`, from `nn.Module` down. That sees classes under any
alias, in dispatch dicts, nested in functions and in reloaded files, and never reads an attribute of
a lazy Python module, which would import the file behind it (transformers 5.24.0: `.*ForCausalLM$`
loads 521 Python modules that way, in six seconds).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from patchlab._upstream import is_transformers_name
from patchlab.mapping.rules import PatchMapping, PatchRule

_BASES = (
    ("torch.nn", "Module"),
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
)


@dataclass(frozen=True, slots=True)
class _Known:
    """What one walk found, and what each key fits of it.

    Put in place whole and never changed but by adding a key, so no lock is needed: at worst two
    threads work the same out.
    """

    signs: tuple[object, ...] = ()
    classes: tuple[type[nn.Module], ...] = ()
    by_key: dict[str, tuple[type[nn.Module], ...]] = field(default_factory=dict)


_known = _Known()


def subclasses_of(root: type) -> Iterator[type]:
    """Yield every live subclass of a class, each once, level by level."""
    seen: set[type] = {root}
    level: list[type] = [root]
    while level:
        following: list[type] = []
        for cls in level:
            subclasses: list[type] = type.__subclasses__(cls)
            for sub in subclasses:
                if sub not in seen:
                    seen.add(sub)
                    following.append(sub)
                    yield sub
        level = following


def loaded_module_classes() -> tuple[type[nn.Module], ...]:
    """Return the module classes that transformers has defined in this process so far.

    The walk takes 0.2 ms for the classes that one model brings, and 8 ms once every architecture is
    loaded; it is left out when nothing can have been defined since the last one.
    """
    return _up_to_date().classes


def matched_classes(mapping: PatchMapping) -> dict[type[nn.Module], PatchRule]:
    """Return the loaded classes of transformers that the rules decide, with the rule of each.

    A class that a rule would replace by itself is left out.
    """
    matched: dict[type[nn.Module], PatchRule] = {}
    for cls in _candidates(mapping):
        rule = mapping.find(cls.__name__)
        if rule is not None and rule.replacement is not cls:
            matched[cls] = rule
    return matched


def _candidates(mapping: PatchMapping) -> list[type[nn.Module]]:
    """Return the classes that any key fits, from answers kept until a class is defined."""
    known = _up_to_date()
    found: dict[type[nn.Module], None] = {}
    for rule in mapping:
        fitting = known.by_key.get(rule.key)
        if fitting is None:
            if len(known.by_key) >= 256:
                known.by_key.clear()
            fitting = tuple(cls for cls in known.classes if rule.matches(cls.__name__))
            known.by_key[rule.key] = fitting
        found.update(dict.fromkeys(fitting))
    return list(found)


def _up_to_date() -> _Known:
    global _known
    known, signs = _known, _signs_of_definition()
    if _same(signs, known.signs):
        return known
    classes = tuple(
        cls
        for cls in subclasses_of(nn.Module)
        if is_transformers_name(getattr(cls, "__module__", None))
    )
    _known = fresh = _Known(signs, classes)
    return fresh


def _signs_of_definition() -> tuple[object, ...]:
    """Return objects of which one changes whenever a class may have been defined.

    Classes are defined by imports, and an import or a reload puts its Python module at the end of
    `sys.modules` with a new `__spec__`. Those made by hand show up as the newest subclass of one of
    the usual base classes.
    """
    modules = sys.modules
    newest = modules.get(next(reversed(modules)))
    signs: list[object] = [len(modules), newest, getattr(newest, "__spec__", None)]
    for name, attribute in _BASES:
        base = vars(modules[name]).get(attribute) if name in modules else None
        if isinstance(base, type):
            children: list[type] = type.__subclasses__(base)
            signs += [len(children), children[-1] if children else None]
    return tuple(signs)


def _same(signs: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(signs) == len(others) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(signs, others, strict=True)
    )
