"""Which modules of a model that is built a swap replaces, and where each of them hangs.

The model is walked once, before anything is changed, so a replacement that holds a module of the
replaced class is never walked into. A module at several paths is one site with several slots. Here
every module class may match, torch's and the user's too: the modules exist, and only they are
looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from patchlab._upstream import pretrained_model_class
from patchlab.apply.parametrized import class_of
from patchlab.apply.tensor_names import parts_of
from patchlab.mapping.rules import PatchMapping, PatchRule


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """One place where a module hangs: `parent._modules[name]`."""

    parent: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """One module that is to be replaced.

    Attributes:
        module: The module that is there now.
        rule: The rule that decides its class.
        slots: Every place where it hangs; none for the root.
        fqn: Its first path, "" for the root.
        owner: The outermost model of transformers that it is in or that it is, None outside of any.
        owner_fqn: That model's path.
    """

    module: nn.Module
    rule: PatchRule
    slots: tuple[Slot, ...]
    fqn: str
    owner: nn.Module | None
    owner_fqn: str

    @property
    def original(self) -> type[nn.Module]:
        """The class that is replaced."""
        return class_of(self.module)

    @property
    def owned_fqn(self) -> str:
        """The path within the owner, "" for the owner itself."""
        if not self.owner_fqn:
            return self.fqn
        return self.fqn[len(self.owner_fqn) + 1 :]


@dataclass(frozen=True, eq=False, slots=True)
class Sites:
    """What a walk over a model found.

    Attributes:
        sites: The modules to replace, in order; none lies below another.
        done: Key → modules that are of the rule's replacement class already.
        class_names: The names of all classes in the model.
        parts: FQN → module, of the whole model.
    """

    sites: tuple[Site, ...]
    done: dict[str, int]
    class_names: frozenset[str]
    parts: dict[str, nn.Module]


def find_sites(model: nn.Module, mapping: PatchMapping) -> Sites:
    """Find the modules that a mapping replaces in a model, the root included.

    Below a module that is of a replacement class already, that rule decides nothing: inside a
    replacement the original's name means the original, as it does while one is constructed. So a
    swap that is done a second time does nothing.
    """
    fqns: dict[int, str] = {}
    hanging: dict[int, list[Slot]] = {}
    names: set[str] = set()
    parts = parts_of(model)
    for fqn, module in parts.items():
        fqns[id(module)] = fqn
        names.add(class_of(module).__name__)
        for name, child in module._modules.items():
            if child is not None:
                path = f"{fqn}.{name}" if fqn else name
                hanging.setdefault(id(child), []).append(Slot(module, name, path))
    replacements: dict[type[nn.Module], list[PatchRule]] = {}
    for rule in mapping:
        replacements.setdefault(rule.replacement, []).append(rule)
    done = dict.fromkeys((rule.key for rule in mapping), 0)
    sites: list[Site] = []
    seen: set[int] = set()
    pretrained = pretrained_model_class()
    Entry = tuple[nn.Module, nn.Module | None, str, frozenset[str]]
    stack: list[Entry] = [(model, None, "", frozenset())]
    while stack:
        module, owner, owner_fqn, inside = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        fqn = fqns[id(module)]
        if owner is None and isinstance(module, pretrained):
            owner, owner_fqn = module, fqn
        cls = class_of(module)
        for rule in replacements.get(cls, ()):
            done[rule.key] += 1
            inside = inside | {rule.key}
        rule_here = mapping.find(cls.__name__)
        if rule_here is not None and rule_here.key not in inside:
            slots = tuple(hanging.get(id(module), ()))
            sites.append(Site(module, rule_here, slots, fqn, owner, owner_fqn))
            continue
        for child in reversed(list(module._modules.values())):
            if child is not None:
                stack.append((child, owner, owner_fqn, inside))
    return Sites(tuple(sites), done, frozenset(names), parts)
