"""Router sites: the modules of a model that choose experts, and how each of them chooses.

Routers of transformers 5.24.0 come in more shapes than one interface covers: 75 families, with the
choice made in a router or in the block around it, by `topk`, `argmax`, a sparse mixer or a table.
What they have in common is that *a class which chooses says so in its own source*. So sites are
found by reading the source of the module's class, once for each class (reading it for each of 48
layers took 0.47 s), and everything else is read off the instance: how many experts each token gets,
out of how many, in how many groups.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from patchlab._upstream import is_transformers_name
from patchlab.errors import RoutingError
from patchlab.model.walk import check_module

Choice = Literal["topk", "argmax", "mixer", "table", "product"]

_CHOOSES = re.compile(r"\btopk\(|\bargmax\(|\bsparsemixer\(|\btid2eid\[")
# The parts of a mixture of experts; in Qwen2MoeAttention "Moe" is a part of the model's name.
_NEAR_A_ROUTER = re.compile(
    r"router|expert|gate$|sparsemo|moe(block|layer|mlp|ffn)?$", re.IGNORECASE
)
# The same operations choose tokens, channels and positions elsewhere; a router is named as one.
_NAMED_AS_ROUTER = re.compile(r"(Router|Gating|Gate|MoE|Moe|FFN|SparseMLP|SparseMo[eE]Block)$")
# A replacement may have any name. Where it is says as much.
_PLACES_OF_ROUTERS = frozenset({"gate", "router"})
# GraniteDoclingDensityRouter sends image tiles to one of two projectors: no experts.
_NO_ROUTER = re.compile(r"Density")
# Towers that no language model routes through: prediction heads and encoders of other modalities.
# Only before the layer number: `vision_moe` inside a text layer routes that layer's tokens.
_SIDE_TOWER = re.compile(r"^(\D*\.)?(mtp\w*|vision\w*|visual\w*|audio\w*|image\w*|nextn\w*)\.")
# Names that wrappers (torch.compile, DDP, FSDP, checkpoint wrappers) put into an FQN.
_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# Weak, since a class in a notebook is defined again with each run of its cell.
_SOURCES: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_CHOICES: weakref.WeakKeyDictionary[type, Choice | None] = weakref.WeakKeyDictionary()
_CHOICES_IN_PLACE: weakref.WeakKeyDictionary[type, Choice | None] = weakref.WeakKeyDictionary()

_TOP_K = ("top_k", "moe_top_k")
_CONFIG_TOP_K = ("top_k_experts", "num_experts_per_tok")
_WIDTHS = ("num_router_classes", "n_routed_experts", "num_experts")


@dataclass(frozen=True, slots=True, eq=False)
class RouterSite:
    """One module that chooses experts.

    Attributes:
        fqn: Its name in the model, without what wrappers add.
        module: The module; its class may be exchanged while routing is recorded or replayed.
        layer: Index of the layer it sits in, -1 if its FQN has no number.
        owner: FQN of the nearest `PreTrainedModel` around it, "" for the model itself.
        owner_module: That model. Its forward is one pass over the tokens the site routes.
        choice: The operation that chooses.
        num_experts: Experts it chooses from, those without parameters (zero and skip experts) too.
        top_k: Experts for each token.
        widths: Sizes of the last dimension by which the choosing operation is told from others.
        num_groups, top_k_groups: Experts are in this many groups, and all of a token's experts lie
            in this many of them; 1 and 1 without groups.
        repeats: Whether one token may have the same expert twice (table look-up).
    """

    fqn: str
    module: nn.Module
    layer: int
    owner: str
    owner_module: nn.Module
    choice: Choice
    num_experts: int
    top_k: int
    widths: frozenset[int]
    num_groups: int = 1
    top_k_groups: int = 1
    repeats: bool = False

    @property
    def in_side_tower(self) -> bool:
        """Whether it is in a prediction head or in the encoder of another modality."""
        return bool(_SIDE_TOWER.search(self.fqn))

    @property
    def class_name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


def _source(cls: type[nn.Module]) -> str:
    """Return the source of a class and of its bases up to torch, without what cannot be read."""
    if cls in _SOURCES:
        return _SOURCES[cls]
    texts = []
    for base in cls.__mro__:
        if base is object or base.__module__.partition(".")[0] == "torch":
            continue
        try:
            texts.append(inspect.getsource(base))
        except (OSError, TypeError):
            # A class typed at a prompt has no file. Its bases, which it mostly adapts, have one.
            continue
    _SOURCES[cls] = source = "\n".join(texts)
    return source


def choice_of(cls: type[nn.Module], *, in_place: bool = False) -> Choice | None:
    """Tell by which operation a module class chooses experts; None if it does not.

    Args:
        cls: The class.
        in_place: Whether a module of it is where routers are, so that it need not be named as one.
    """
    known = _CHOICES_IN_PLACE if in_place else _CHOICES
    if cls not in known:
        known[cls] = _choice_of(cls, in_place)
    return known[cls]


def _choice_of(cls: type[nn.Module], in_place: bool) -> Choice | None:
    if _NO_ROUTER.search(cls.__name__):
        return None
    if not in_place and not any(_NAMED_AS_ROUTER.search(base.__name__) for base in cls.__mro__):
        return None
    source = _source(cls)
    if not _CHOOSES.search(source):
        return None
    if "tid2eid[" in source:
        return "table"
    if "num_keys" in source:
        return "product"
    if "sparsemixer(" in source:
        return "mixer"
    return "argmax" if "argmax(" in source else "topk"


def _attribute(holder: object, name: str) -> object:
    if isinstance(holder, nn.Module) and not hasattr(type(holder), name):
        # Past the module's own __getattr__, which takes 2 µs and an error to say that it has none.
        return vars(holder).get(name)
    return getattr(holder, name, None)


def _first_int(holder: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = _attribute(holder, name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _top_k(module: nn.Module, choice: Choice) -> int | None:
    if choice == "argmax":
        # Nllb picks a second expert by a second argmax; Switch picks one.
        return 2 if "top_2" in _source(type(module)) else 1
    own = _first_int(module, _TOP_K)
    return own if own is not None else _first_int(_attribute(module, "config"), _CONFIG_TOP_K)


def _widths(module: nn.Module) -> frozenset[int]:
    found = [_first_int(module, (name,)) for name in _WIDTHS]
    # Dbrx keeps the number on its experts, Gemma 4 in the config alone.
    found.append(_first_int(_attribute(module, "config"), ("num_experts",)))
    found.append(_first_int(module._modules.get("experts"), ("num_experts",)))
    return frozenset(width for width in found if width is not None)


def _groups(module: nn.Module) -> tuple[int, int]:
    if _attribute(module, "topk_method") == "greedy":
        return 1, 1  # DeepSeek-V2 has the numbers and does not use them (V2-Lite).
    number = _first_int(module, ("num_group", "n_group")) or 1
    return (number, _first_int(module, ("topk_group",)) or 1) if number > 1 else (1, 1)


def plain_fqn(fqn: str) -> str:
    """Return an FQN without the names that wrappers add to it."""
    parts = fqn.split(".")
    return fqn if _WRAPPERS.isdisjoint(parts) else ".".join(p for p in parts if p not in _WRAPPERS)


def layer_of(fqn: str) -> int:
    """Return the first number in an FQN, -1 if there is none."""
    return next((int(part) for part in fqn.split(".") if part.isdigit()), -1)


def _owner(fqn: str, modules: Mapping[str, nn.Module], owners: set[str]) -> tuple[str, nn.Module]:
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        if fqn in owners:
            return fqn, modules[fqn]
    return "", modules[""]


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module of a model once, by its FQN.

    Raises:
        TargetError: It is no `nn.Module`.
    """
    check_module(model)
    return dict(model.named_modules())


def find_routers(model: nn.Module, *, side_towers: bool = False) -> tuple[RouterSite, ...]:
    """Find the modules of a model that choose experts, in the order of its modules.

    Args:
        model: Any module: a base model, one with a head, a wrapped or a compiled one.
        side_towers: Also those in prediction heads (MTP) and in encoders of other modalities, which
            are left out since their tokens are not the language model's.

    Raises:
        RoutingError: There is none; or one does not say how many experts it chooses.
        TargetError: `model` is no `nn.Module`.
    """
    return routers_among(modules_of(model), side_towers=side_towers)


def routers_among(
    modules: Mapping[str, nn.Module], *, side_towers: bool = False
) -> tuple[RouterSite, ...]:
    """Find the routers among the modules of a model; see `find_routers`.

    Raises:
        RoutingError: There is none; or one does not say how many experts it chooses.
    """
    from transformers import PreTrainedModel

    # Asked once for each class: a model has hundreds of modules and a dozen classes.
    classes = {type(module) for module in modules.values()}
    choices = {cls: choice_of(cls) for cls in classes}
    owning = {cls for cls in classes if issubclass(cls, PreTrainedModel)}
    owners = {fqn for fqn, module in modules.items() if type(module) in owning}
    sites = []
    for fqn, module in modules.items():
        choice = choices[type(module)]
        if choice is None and fqn.rpartition(".")[2] in _PLACES_OF_ROUTERS:
            choice = choice_of(type(module), in_place=True)
        if choice is None or (not side_towers and _SIDE_TOWER.search(fqn)):
            continue
        top_k, widths = _top_k(module, choice), _widths(module)
        if top_k is None or not widths:
            what = "how many experts a token gets (top_k)" if top_k is None else "num_experts"
            raise RoutingError(
                f"{plain_fqn(fqn)} ({type(module).__name__}) chooses experts but does not say "
                f"{what}. Give the module an attribute of that name."
            )
        groups, top_k_groups = _groups(module)
        owner, owner_module = _owner(fqn, modules, owners)
        sites.append(
            RouterSite(
                fqn=plain_fqn(fqn),
                module=module,
                layer=layer_of(fqn),
                owner=plain_fqn(owner),
                owner_module=owner_module,
                choice=choice,
                num_experts=max(widths),
                top_k=top_k,
                widths=widths,
                num_groups=groups,
                top_k_groups=top_k_groups,
                repeats=choice == "table",
            )
        )
    if not sites:
        raise RoutingError(_nothing_found(modules))
    return tuple(sites)


def _nothing_found(modules: Mapping[str, nn.Module]) -> str:
    model = modules[""]
    near = sorted(
        {
            type(module).__name__
            for module in modules.values()
            if _NEAR_A_ROUTER.search(type(module).__name__)
        }
    )
    if near:
        return (
            f"{type(model).__name__} has no module that chooses experts, though it has "
            f"{', '.join(near[:4])}. A router is found by its name (…Router, …Gate, …MoE) and by a "
            f"topk or argmax call in the source of its class; a kernel that replaces the whole "
            f"block makes the choice where it cannot be seen."
        )
    source = "" if is_transformers_name(type(model).__module__) else " (or in what it wraps)"
    return (
        f"{type(model).__name__} has no router: no module in it{source} chooses experts. "
        f"Routing can be recorded on mixture-of-experts models only."
    )
