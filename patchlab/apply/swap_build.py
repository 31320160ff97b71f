"""The new modules of a swap: how each original was constructed, and its replacement built alike.

For a module of a model of transformers the arguments are those that the model itself gives: its
structure is built once more on the meta device, unpatched, and every call of a matched constructor
is noted. Elsewhere (a plain module, a class of torch) arguments are read off the module: a
parameter of the constructor that the module keeps as an attribute of the same name. Whether that
was right is seen by building the original so, and comparing names and shapes with the module there.

A replacement that can be made from the module itself says so with a class method
`from_original(cls, original)`, which is then used and taken as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from patchlab.apply.construct import Construction, Frame, close_frame, open_frame
from patchlab.apply.swap_sites import Site
from patchlab.errors import ApplyError, SwapError
from patchlab.mapping.rules import PatchMapping
from patchlab.model.skeleton import copied_config, without_scopes

T = TypeVar("T")
FACTORY = "from_original"


class WithoutRandomInit(TorchFunctionMode):
    """Skips filling tensors with random numbers, in this thread alone.

    The random numbers are not wanted, and take most of the time of a constructor. Constants are
    still filled in.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            # The functions of `torch.nn.init` hand their tensor on by name.
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


_RANDOM = frozenset(
    [
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
        torch.nn.init.kaiming_normal_,
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.normal_,
        torch.nn.init.uniform_,
    ]
)


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


@dataclass(eq=False, slots=True)
class Built:
    """The new module of one site.

    Attributes:
        module: On the meta device, unless `finished`.
        recipe: How to build it again, None for a finished one.
        finished: Whether the replacement's own factory made it.
        skeleton: The skeleton its recipe is from, if any.
    """

    site: Site
    module: nn.Module
    recipe: Recipe | None
    finished: bool = False
    skeleton: Skeleton | None = None


def build_modules(sites: tuple[Site, ...], mapping: PatchMapping) -> list[Built]:
    """Build the new module of every site, on the meta device.

    Raises:
        SwapError: A constructor raised, or cannot be called again.
    """
    skeletons: dict[int, Skeleton | None] = {}
    classes = {site.original for site in sites}
    built = []
    for site in sites:
        factory = getattr(site.rule.replacement, FACTORY, None)
        if factory is not None:
            built.append(Built(site, _from_factory(site, factory), None, finished=True))
            continue
        skeleton = None
        if site.owner is not None:
            if id(site.owner) not in skeletons:
                skeletons[id(site.owner)] = _skeleton_of(site.owner, mapping, classes)
            skeleton = skeletons[id(site.owner)]
        recipe = _recorded(site, skeleton)
        if recipe is None:
            recipe, skeleton = _read_off(site), None
        module = construct(recipe, mapping, classes, torch.device("meta"))
        built.append(Built(site, module, recipe, skeleton=skeleton))
    return built


def construct(
    recipe: Recipe,
    mapping: PatchMapping,
    classes: set[type[nn.Module]],
    device: torch.device,
    *,
    random_init: bool = False,
) -> nn.Module:
    """Call an original's constructor under the mapping, so that its replacement comes out.

    The engine does it, so inside the replacement's constructor the original's name means the
    original, and other matched classes are replaced. The state of the random number generator is
    left as it was.

    Raises:
        SwapError: The constructor raised.
    """

    def build() -> nn.Module:
        with device:
            return recipe.original(*recipe.args, **recipe.kwargs)

    frame = Frame(mapping, classes=set(classes))

    rule = mapping.find(recipe.original.__name__)
    name = (rule.replacement if rule else recipe.original).__qualname__
    try:
        with torch.random.fork_rng(devices=[]):
            if random_init:
                return under(frame, build)
            with WithoutRandomInit():
                return under(frame, build)
    except ApplyError:
        raise
    except Exception as error:
        raise SwapError(
            f"the constructor of {name} raised {type(error).__name__}: {error}. It is called as "
            f"that of {recipe.original.__name__} is, with {_arguments(recipe)}. Take the same "
            f"arguments, or define a class method {FACTORY}(cls, original) that makes one from "
            f"the module."
        ) from error


def _skeleton_of(
    owner: nn.Module, mapping: PatchMapping, classes: set[type[nn.Module]]
) -> Skeleton | None:
    """Build an owner's structure and note how its modules were constructed; None if it fails."""
    memo: dict[int, Any] = {}
    config = copied_config(owner.config, memo)
    calls: list[Construction] = []
    frame = Frame(mapping, classes=set(classes), constructions=calls)
    cls = type(owner)

    def build() -> nn.Module:
        with torch.device("meta"):
            built: nn.Module = cls(config)
            return built

    try:
        with WithoutRandomInit():
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
    """Read the arguments of a constructor off the module that it made.

    Raises:
        SwapError: An argument is kept nowhere, or the original built so is not like the module.
    """
    module, cls = site.module, site.original
    kwargs: dict[str, Any] = {}
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ("device", "dtype"):
            continue
        if name in module._parameters or name in module._buffers:
            # `bias` of a Linear: an option of the constructor, a tensor on the module.
            kwargs[name] = getattr(module, name) is not None
        elif name in module._modules or hasattr(module, name):
            kwargs[name] = getattr(module, name)
        elif parameter.default is parameter.empty:
            raise _unknown(site, f"its constructor takes {name!r}, which the module does not keep")
    recipe = Recipe(cls, (), kwargs)
    try:
        again = _plain(recipe)
    except Exception as error:
        raise _unknown(
            site, f"its constructor raised {type(error).__name__}: {error}, with what could be read"
        ) from error
    if _shapes(again) != _shapes(module):
        raise _unknown(site, "a second one, built with what could be read off it, differs")
    return recipe


def tensors_at(module: nn.Module, *, saved: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and buffer under every name it has, also in a module with a cycle.

    Args:
        module: The module.
        saved: Leave out buffers that are not persistent.
    """
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", module, frozenset())]
    while stack:
        prefix, part, above = stack.pop()
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and not (saved and name in part._non_persistent_buffers_set):
                yield prefix + name, buffer
        inside = above | {id(part)}
        for name, child in reversed(list(part._modules.items())):
            if child is not None and id(child) not in inside:
                stack.append((f"{prefix}{name}.", child, inside))


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a state dict holds, the very tensors, also of a module with a cycle."""
    return dict(tensors_at(module, saved=True))


def _plain(recipe: Recipe) -> nn.Module:
    def build() -> nn.Module:
        with torch.device("meta"):
            return recipe.original(*recipe.args, **recipe.kwargs)

    with WithoutRandomInit():
        return without_scopes(build)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in saved_tensors(module).items()}


def _unknown(site: Site, why: str) -> SwapError:
    replacement = site.rule.replacement.__qualname__
    return SwapError(
        f"{site.fqn or 'the root'} is a {site.original.__qualname__}, and how it was constructed "
        f"is not known: {why}. Let {replacement} say how it is made from the module: define a "
        f"class method {FACTORY}(cls, original) on it."
    )


def _from_factory(site: Site, factory: Callable[[nn.Module], Any]) -> nn.Module:
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
    return module


def under(frame: Frame, function: Callable[[], T]) -> T:
    """Call a function outside of every scope but with one frame open, and close that for certain.

    The second `close_frame` is for an interrupt at the very line of the first.
    """

    def call() -> T:
        try:
            try:
                open_frame(frame)
                return function()
            finally:
                close_frame(frame)
        except BaseException:
            close_frame(frame)
            raise

    return without_scopes(call)


def _arguments(recipe: Recipe) -> str:
    given = [type(value).__name__ for value in recipe.args]
    given += [f"{name}={type(value).__name__}" for name, value in recipe.kwargs.items()]
    return f"({', '.join(given)})" if given else "no arguments"
