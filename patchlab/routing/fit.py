"""Fit: whether a trace is one of this model, told before anything runs.

Routers are matched by name, never by their place in a list: one router more or less would shift
every layer after it. The names may differ by what stands before the layers (`model.` in front of a
base model, `_orig_mod.` of a compiled one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from patchlab.errors import RoutingError
from patchlab.routing.join import model_type
from patchlab.routing.sites import RouterSite
from patchlab.routing.trace import Router, Routes, RoutingTrace


def fitted(
    model: nn.Module, sites: Sequence[RouterSite], trace: RoutingTrace
) -> tuple[tuple[RouterSite, ...], dict[str, Router]]:
    """Match the routers of a model with those of a trace.

    Returns:
        The sites that the trace has routes for, and by their FQN the trace's routers.

    Raises:
        RoutingError: They do not fit; the message says what was found and what was expected.
    """
    routes = trace.routes
    family = model_type(model)
    if routes.model_type and family and routes.model_type != family:
        raise RoutingError(
            f"the trace is of a {routes.model_type!r} model, this one is {family!r}. Experts of "
            f"one family mean nothing to another."
        )
    sites = _same_towers(sites, routes.routers)
    ours = tails([site.fqn for site in sites])
    theirs = tails([router.fqn for router in routes.routers])
    routers = {theirs[router.fqn]: router for router in routes.routers}
    missing = [site.fqn for site in sites if ours[site.fqn] not in routers]
    known = set(ours.values())
    surplus = [router.fqn for router in routes.routers if theirs[router.fqn] not in known]
    if missing or surplus:
        raise RoutingError(
            f"the model has {len(sites)} routers, the trace {len(routes.routers)}"
            + (f"; without a trace: {_some(missing)}" if missing else "")
            + (f"; without a router: {_some(surplus)}" if surplus else "")
            + ". Record on a model of the same configuration."
        )
    matched = {site.fqn: routers[ours[site.fqn]] for site in sites}
    for site in sites:
        _same_shape(site, matched[site.fqn])
    if not any(index.shape[0] for index in routes.indices.values()):
        raise RoutingError("the trace has no tokens: no forward ran while it was recorded.")
    return tuple(sites), matched


def _same_towers(sites: Sequence[RouterSite], routers: Sequence[Router]) -> Sequence[RouterSite]:
    # Side towers take part if they were recorded, which their names tell.
    main = [site for site in sites if not site.in_side_tower]
    return main if len(main) == len(routers) or len(sites) != len(routers) else sites


def tails(fqns: Sequence[str]) -> dict[str, str]:
    """Return, by FQN, what is left without what all of them have in front of the layer number."""
    heads = [_head(fqn) for fqn in fqns]
    shared = heads[0] if heads else []
    for head in heads[1:]:
        same = 0
        while same < min(len(shared), len(head)) and shared[same] == head[same]:
            same += 1
        shared = shared[:same]
    return {fqn: ".".join(fqn.split(".")[len(shared) :]) for fqn in fqns}


def _head(fqn: str) -> list[str]:
    parts = fqn.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return parts[: numbers[0]] if numbers else parts[:-1]


def _same_shape(site: RouterSite, router: Router) -> None:
    if router.top_k != site.top_k:
        raise RoutingError(
            f"{site.fqn} chooses {site.top_k} experts for each token, the trace has {router.top_k}."
        )
    if router.num_experts != site.num_experts:
        raise RoutingError(
            f"{site.fqn} chooses from {site.num_experts} experts, the trace was recorded on "
            f"{router.num_experts}."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_routes(routes: Routes) -> None:
    """Check the experts themselves, where they come from elsewhere.

    Raises:
        RoutingError: An expert that the router has not; the same expert twice in a row; more groups
            than the router allows; or all zeros, which is what engines put where they have nothing.
    """
    for router in routes.routers:
        index = routes.indices[router.fqn]
        if index.dim() != 2 or index.shape[1] != router.top_k:
            raise RoutingError(
                f"{router.fqn}: routes of shape {tuple(index.shape)}, expected (num_tokens, "
                f"{router.top_k})."
            )
        largest = int(index.max()) if index.numel() else 0
        if largest >= router.num_experts:
            raise RoutingError(
                f"{router.fqn}: expert {largest}, but there are {router.num_experts}, counted from "
                f"0. The routes are of another model, or of a dense layer."
            )
        if router.top_k > 1 and not router.repeats:
            _check_rows(router, index)
        if router.num_groups > 1:
            _check_groups(router, index)


def _check_rows(router: Router, index: torch.Tensor) -> None:
    ordered = index.sort(dim=-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=-1)
    if not bool(twice.any()):
        return
    empty = (index == 0).all(dim=-1)
    if bool(empty.any()):
        raise RoutingError(
            f"{router.fqn}: {int(empty.sum())} of {len(index)} tokens have no routes, only zeros, "
            f"the first at row {_first(empty)}. An engine leaves zeros for tokens it did not run "
            f"(cached ones, say); put -1 there to route them live, or cut them off."
        )
    row = _first(twice)
    raise RoutingError(
        f"{router.fqn}: token {row} has an expert twice, {index[row].tolist()}. A router never "
        f"chooses so; the array may be shaped (layers, tokens, top_k), or of another type."
    )


def _check_groups(router: Router, index: torch.Tensor) -> None:
    per_group = router.num_experts // router.num_groups
    used = torch.zeros(len(index), router.num_groups, dtype=torch.int64)
    known = index.long()
    used.scatter_add_(1, known.clamp(min=0) // per_group, (known >= 0).long())
    spread = (used > 0).sum(dim=-1)
    beyond = spread > router.top_k_groups
    if bool(beyond.any()):
        row = _first(beyond)
        raise RoutingError(
            f"{router.fqn}: the experts of token {row} lie in {int(spread[row])} groups, the "
            f"router allows {router.top_k_groups} of {router.num_groups}. The routes are of a "
            f"model with other groups."
        )


def _first(flags: torch.Tensor) -> int:
    return int(flags.nonzero()[0])


def routers_of(sites: Iterable[RouterSite], tokens: str) -> tuple[Router, ...]:
    """Describe the routers of a model for a trace that is made from elsewhere."""
    return tuple(
        Router(
            site.fqn,
            site.layer,
            site.num_experts,
            site.top_k,
            tokens,
            site.repeats,
            site.num_groups,
            site.top_k_groups,
        )
        for site in sites
    )
