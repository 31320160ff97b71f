"""How the modules of a live model were constructed, so that their constructors can be called again.

For a module of a model of transformers the arguments are those that the model itself gives: its
structure is built once more on the meta device, unpatched, and every call of a matched constructor
is noted. The matched modules stay empty meanwhile, which saves most of the work; where something
looks into one of them the structure is built whole.

Elsewhere (a plain module, a class of torch) arguments are read off the module: a parameter of the
constructor that the module keeps as an attribute of the same name. Whether that was right is seen
by building the original so, and comparing names and shapes with the module there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from patchlab.apply.construct import Construction, Frame
from patchlab.apply.constructing import under
from patchlab.apply.parametrized import class_of, computed_tensors, made_from
from patchlab.apply.swap_sites import Site
from patchlab.errors import SwapError
from patchlab.mapping.rules import PatchMapping
from patchlab.model.random_init import WithoutRandomInit
from patchlab.model.skeleton import copied_config, without_scopes

FACTORY = "from_original"


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """How the original of one site was constructed."""

    original: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Skeleton:
    """The unpatched structure of one owner on the meta device.

    Attributes:
        model: The structure.
        recipes: Id of a module in it → how that was constructed.
        configs: Id of a copied config → the owner's own. The copies are kept alive by `memo`.
        places: Id of a module in it → its path in the owner.
    """

    model: nn.Module
    recipes: dict[int, Recipe]
    configs: dict[int, Any]
    memo: dict[int, Any]
    places: dict[int, str] = field(default_factory=dict)


class RecipeBook:
    """Finds the recipes of the sites of one swap; builds each structure it needs once."""

    def __init__(self, mapping: PatchMapping, sites: tuple[Site, ...]) -> None:
        self._mapping = mapping
        self._classes = {site.original for site in sites}
        self._skeletons: dict[tuple[int, bool], Skeleton | None] = {}

    def find(self, site: Site) -> tuple[Recipe, Skeleton | None]:
        """Return how a site's module was constructed, and the structure that says so, if one does.

        Raises:
            SwapError: An argument is kept nowhere, or the original built so is not like the module.
        """
        if site.owner is not None:
            for hollow in (True, False):
                at = id(site.owner), hollow
                if at not in self._skeletons:
                    self._skeletons[at] = _skeleton_of(
                        site.owner, self._mapping, self._classes, hollow
                    )
                skeleton = self._skeletons[at]
                recipe = _recorded(site, skeleton)
                if recipe is not None and not (hollow and _takes_modules(recipe)):
                    return recipe, skeleton
        return _read_off(site), None


def _takes_modules(recipe: Recipe) -> bool:
    """Tell whether a constructor is given modules, which only a whole structure has in place."""
    waiting = [*recipe.args, *recipe.kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, nn.Module | Iterator):
            return True
        if isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
    return False


def plain_original(recipe: Recipe) -> nn.Module:
    """Build an original, unpatched and on the meta device."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return recipe.original(*recipe.args, **recipe.kwargs)

    with torch.random.fork_rng(devices=[]), WithoutRandomInit():
        return without_scopes(build)


def _skeleton_of(
    owner: nn.Module, mapping: PatchMapping, classes: set[type[nn.Module]], hollow: bool
) -> Skeleton | None:
    """Build an owner's structure and note how its modules were constructed; None if it fails."""
    memo: dict[int, Any] = {}
    config = copied_config(owner.config, memo)
    calls: list[Construction] = []
    frame = Frame(mapping, classes=set(classes), constructions=calls, hollow=hollow)
    cls = class_of(owner)

    def build() -> nn.Module:
        with torch.device("meta"):
            return cls(config)

    try:
        with torch.random.fork_rng(devices=[]), WithoutRandomInit():
            model = under(frame, build)
    except Exception:  # noqa: BLE001  (a class with arguments beside the config: read off instead)
        return None
    # `memo` holds originals by their id, and, under its own id, the list that keeps them alive.
    configs = {
        id(copied): found
        for found in _configs_in(owner.config)
        if (copied := memo.get(id(found))) is not None
    }
    recipes = {id(c.module): Recipe(c.original, c.args, c.kwargs) for c in calls}
    skeleton = Skeleton(model, recipes, configs, memo)
    for fqn, module in model.named_modules():
        skeleton.places[id(module)] = fqn
    return skeleton


def _configs_in(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs_in(value)


def _recorded(site: Site, skeleton: Skeleton | None) -> Recipe | None:
    if skeleton is None:
        return None
    try:
        module = skeleton.model.get_submodule(site.owned_fqn)
    except AttributeError:
        return None
    recipe = skeleton.recipes.get(id(module))
    if recipe is None or type(module) is not site.original:
        return None
    return recipe


def _read_off(site: Site) -> Recipe:
    module, cls = site.module, site.original
    computed = computed_tensors(module)
    kwargs: dict[str, Any] = {}
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ("device", "dtype"):
            continue
        if name in computed:
            kwargs[name] = True
        elif name in module._parameters or name in module._buffers:
            # `bias` of a Linear: an option of the constructor, a tensor on the module.
            kwargs[name] = getattr(module, name) is not None
        elif name in module._modules or name in vars(module) or _is_property(cls, name):
            kwargs[name] = getattr(module, name)
        elif parameter.default is parameter.empty:
            raise _unknown(site, f"its constructor takes {name!r}, which the module does not keep")
    recipe = Recipe(cls, (), kwargs)
    try:
        again = plain_original(recipe)
    except Exception as error:
        raise _unknown(
            site, f"its constructor raised {type(error).__name__}: {error}, with what could be read"
        ) from error
    if not _agree(again, module, frozenset()):
        raise _unknown(site, "a second one, built with what could be read off it, differs")
    return recipe


def _is_property(cls: type[nn.Module], name: str) -> bool:
    """Tell an attribute that a class computes or has as a constant from a method of it."""
    return hasattr(cls, name) and not callable(getattr(cls, name))


def _agree(again: nn.Module, module: nn.Module, above: frozenset[int]) -> bool:
    """Compare names and shapes, but not below a part of another class: that was put there since."""
    computed = computed_tensors(module)
    without = {*computed, *(other for name in computed for other in made_from(module, name))}
    if _shapes(again, without) != _shapes(module, without):
        return False
    for name, child in module._modules.items():
        if child is None or id(child) in above or (computed and name == "parametrizations"):
            continue
        other = again._modules.get(name)
        # One that is not there was added since, and is put in again.
        if (
            other is not None
            and type(other) is class_of(child)
            and not _agree(other, child, above | {id(module)})
        ):
            return False
    return all(module._modules.get(name) is not None for name, c in again._modules.items() if c)


def _shapes(module: nn.Module, without: set[str]) -> dict[str, torch.Size]:
    return {
        name: tensor.shape
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
        and name not in module._non_persistent_buffers_set
        and name not in without
    }


def _unknown(site: Site, why: str) -> SwapError:
    replacement = site.rule.replacement.__qualname__
    return SwapError(
        f"{site.fqn or 'the root'} is a {site.original.__qualname__}, and how it was constructed "
        f"is not known: {why}. Let {replacement} say how it is made from the module: define a "
        f"class method {FACTORY}(cls, original) on it."
    )
