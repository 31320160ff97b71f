"""The new modules of a swap, built as their originals were, and by the engine that patches.

A replacement that can be made from the module itself says so with a class method
`from_original(cls, original)`, which is then used and taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from patchlab.apply.construct import Frame, Replaced
from patchlab.apply.constructing import under
from patchlab.apply.swap_clone import clone_of
from patchlab.apply.swap_recipes import FACTORY, Recipe, RecipeBook, Skeleton
from patchlab.apply.swap_sites import Site
from patchlab.apply.swap_snapshot import Snapshot
from patchlab.apply.tensor_names import joined, parts_of, tensors_at
from patchlab.errors import ApplyError, SwapError
from patchlab.mapping.rules import PatchMapping
from patchlab.model.random_init import WithoutRandomInit


@dataclass(eq=False, slots=True)
class Built:
    """The new module of one site.

    Attributes:
        module: On the meta device, unless `finished`.
        recipe: How to build it again, None for a finished one.
        old_parts: Path → part of the old module, as it was before any factory had it in hand.
        old_tensors: Name → parameter or buffer of it, by every name.
        finished: Whether the replacement's own factory made it.
        cloned: Whether it has the old module's attributes, and children, and no recipe.
        skeleton: The skeleton its recipe is from, if any.
        inside: By the id of a part of it, what its construction put there in place of an original.
    """

    site: Site
    module: nn.Module
    recipe: Recipe | None
    old_parts: dict[str, nn.Module]
    old_tensors: dict[str, torch.Tensor]
    finished: bool = False
    cloned: bool = False
    skeleton: Skeleton | None = None
    inside: dict[int, Replaced] = field(default_factory=dict)

    @property
    def replaced_parts(self) -> list[tuple[str, Replaced]]:
        """FQN and rule of each part that is replaced as well, since another rule matches it."""
        if not self.inside:
            return []
        return [
            (joined(self.site.fqn, path), noted)
            for path, part in self.new_parts.items()
            if path and (noted := self.inside.get(id(part))) and noted.module() is part
        ]

    @property
    def new_parts(self) -> dict[str, nn.Module]:
        """Path → part of the new module, as it is now.

        A clone has those of the old one, none of which is the old one itself.
        """
        return {**self.old_parts, "": self.module} if self.cloned else parts_of(self.module)


def build_modules(
    sites: tuple[Site, ...], mapping: PatchMapping, snapshots: list[Snapshot], *, clone: bool
) -> list[Built]:
    """Build the new module of every site, on the meta device.

    Args:
        sites: What is to be replaced.
        mapping: By what.
        snapshots: Takes one of each module that is handed to a factory, before it is.
        clone: Whether what needs no constructor may do without.

    Raises:
        SwapError: A constructor raised, or cannot be called again; a tensor is not initialized.
    """
    book = RecipeBook(mapping, sites)
    parts = [parts_of(site.module) for site in sites]
    tensors = [dict(tensors_at(site.module)) for site in sites]
    factories = [getattr(site.rule.replacement, FACTORY, None) for site in sites]
    recipes: dict[int, tuple[Recipe, Skeleton | None]] = {}
    clones: dict[int, nn.Module] = {}
    for i, site in enumerate(sites):
        if factories[i] is not None:
            continue
        _check_not_lazy(site, tensors[i])
        cloned = clone_of(site, parts[i], mapping) if clone else None
        if cloned is None:
            recipes[i] = book.find(site)
        else:
            clones[i] = cloned
    classes = {site.original for site in sites}
    calls = [recipe for recipe, _ in recipes.values()]
    noted: list[Replaced] = []
    modules = construct(calls, mapping, classes, torch.device("meta"), noted=noted)
    made = dict(zip(recipes, modules, strict=True))
    inside = {id(part): one for one in noted if (part := one.module()) is not None}
    built = []
    for i, (site, factory) in enumerate(zip(sites, factories, strict=True)):
        if i in clones:
            item = Built(site, clones[i], None, parts[i], tensors[i], cloned=True)
        elif factory is None:
            recipe, skeleton = recipes[i]
            item = Built(
                site, made[i], recipe, parts[i], tensors[i], skeleton=skeleton, inside=inside
            )
        else:
            snapshots.append(Snapshot(site.module))
            module = _from_factory(site, factory, tensors[i])
            item = Built(site, module, None, parts[i], tensors[i], finished=True)
        built.append(item)
    for snapshot in snapshots:
        snapshot.note_changes()
    return built


def construct(
    recipes: list[Recipe],
    mapping: PatchMapping,
    classes: set[type[nn.Module]],
    device: torch.device,
    *,
    largest: int = -1,
    noted: list[Replaced] | None = None,
) -> list[nn.Module]:
    """Call originals' constructors under the mapping, so that their replacements come out.

    The engine does it, so inside a replacement's constructor the original's name means the
    original, and other matched classes are replaced. The state of the random number generator is
    left as it was.

    Args:
        recipes: How the originals were constructed.
        mapping: The rules.
        classes: The originals, also such as no rule would look for.
        device: Where the tensors are made.
        largest: Tensors of more elements than that are not filled with random numbers.
        noted: Takes what was replaced, the parts of what was constructed too.

    Raises:
        SwapError: A constructor raised.
    """
    if not recipes:
        return []

    def build_all() -> list[nn.Module]:
        with device:
            return [_call(recipe, mapping) for recipe in recipes]

    frame = Frame(mapping, classes=set(classes))
    with torch.random.fork_rng(devices=[]), WithoutRandomInit(largest):
        made = under(frame, build_all)
    if noted is not None:
        noted += frame.replaced
    return made


def _check_not_lazy(site: Site, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise SwapError(
                f"{joined(site.fqn, name)} is not initialized: a lazy module has no shapes before "
                f"its first forward. Run the model once, then swap."
            )


def _call(recipe: Recipe, mapping: PatchMapping) -> nn.Module:
    try:
        return recipe.original(*recipe.args, **recipe.kwargs)
    except ApplyError:
        raise
    except Exception as error:
        rule = mapping.find(recipe.original.__name__)
        name = (rule.replacement if rule else recipe.original).__qualname__
        raise SwapError(
            f"the constructor of {name} raised {type(error).__name__}: {error}. It is called as "
            f"that of {recipe.original.__name__} is, with {_arguments(recipe)}. Take the same "
            f"arguments, or define a class method {FACTORY}(cls, original) that makes one from "
            f"the module."
        ) from error


def _from_factory(
    site: Site, factory: Callable[[nn.Module], Any], tensors: dict[str, torch.Tensor]
) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):
            module = factory(site.module)
    except Exception as error:
        raise SwapError(
            f"{site.rule.replacement.__qualname__}.{FACTORY} raised {type(error).__name__} for "
            f"{site.fqn or 'the root'}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise SwapError(
            f"{site.rule.replacement.__qualname__}.{FACTORY} returned {module!r} for "
            f"{site.fqn or 'the root'}; it must return a module."
        )
    known = {id(tensor) for tensor in tensors.values()}
    for name, tensor in tensors_at(module):
        if tensor.device.type == "meta" and id(tensor) not in known:
            raise SwapError(
                f"{site.rule.replacement.__qualname__}.{FACTORY} left {name} on the meta device, "
                f"where it holds nothing. What a factory returns is taken as it is."
            )
    return module


def _arguments(recipe: Recipe) -> str:
    given = [type(value).__name__ for value in recipe.args]
    given += [f"{name}={type(value).__name__}" for name, value in recipe.kwargs.items()]
    return f"({', '.join(given)})" if given else "no arguments"
