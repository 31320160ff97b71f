"""Everything of a swap but its commit: the new modules with their tensors, and what is odd.

Nothing here changes the model, except for what a user's own factory does to the module it is given;
that is noted, and put back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from patchlab._upstream import weight_transforms
from patchlab.apply.construct import Frame
from patchlab.apply.constructing import under
from patchlab.apply.conversions import Conversions
from patchlab.apply.swap_build import Built, build_modules
from patchlab.apply.swap_containers import container_findings, dropped_inside
from patchlab.apply.swap_converting import NOTHING, Converted, convert_tensors
from patchlab.apply.swap_findings import (
    conversion_findings,
    frozen_findings,
    key_findings,
    left_findings,
    part_findings,
    tensor_findings,
    tie_findings,
)
from patchlab.apply.swap_offload import check_supply
from patchlab.apply.swap_optimizers import optimizer_findings
from patchlab.apply.swap_parts import Parts, keep_parts
from patchlab.apply.swap_sites import Sites, find_sites
from patchlab.apply.swap_snapshot import Snapshot
from patchlab.apply.swap_state import carry_state, shared_parts
from patchlab.apply.swap_tensors import Filled, already_filled, fill
from patchlab.mapping.rules import PatchMapping
from patchlab.model.skeleton import without_scopes
from patchlab.plan.findings import Finding, ordered
from patchlab.plan.plan import Replacement, counts_of, grouped


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """A swap that is ready to be committed.

    Attributes:
        sites: What is replaced, and where it hangs.
        built: The new modules.
        filled: What became of the tensors of each.
        converted: What conversions made, by the id of the owner.
        replacements: What is replaced, with FQNs.
        counts: Key → number of modules replaced, 0 included.
        findings: What is odd, errors first.
    """

    sites: Sites
    built: list[Built]
    filled: list[Filled]
    converted: dict[int, Converted]
    replacements: tuple[Replacement, ...]
    counts: dict[str, int]
    findings: tuple[Finding, ...]


def prepare(
    model: nn.Module, rules: PatchMapping, conversions: Conversions, snapshots: list[Snapshot]
) -> Prepared:
    """Build and fill the new modules of a swap.

    Args:
        model: The model.
        rules: What to replace.
        conversions: Model type or class name → weight conversions.
        snapshots: Takes one of each module that is handed to a factory, before it is.

    Raises:
        SwapError: A module cannot be replaced.
    """
    # What is made in inference mode could never be trained, unless the weights cannot be anyway.
    if torch.is_inference_mode_enabled() and not any(p.is_inference() for p in model.parameters()):
        with torch.inference_mode(False):
            return _prepare(model, rules, conversions, snapshots)
    return _prepare(model, rules, conversions, snapshots)


def _prepare(
    model: nn.Module, rules: PatchMapping, conversions: Conversions, snapshots: list[Snapshot]
) -> Prepared:
    sites = find_sites(model, rules)
    live = frozenset(map(id, sites.parts.values()))
    built, parts, converted = _build(model, sites, rules, conversions, snapshots, live, clone=True)
    if any(item.cloned for item in built) and any(c.made for c in converted.values()):
        # Conversions have work to do, and a clone has the old children.
        for snapshot in snapshots:
            snapshot.put_back()
        snapshots.clear()
        built, parts, converted = _build(
            model, sites, rules, conversions, snapshots, live, clone=False
        )
    filled = []
    for item in built:
        if item.finished:
            filled.append(already_filled(item))
            continue
        made, place = converted[id(item.site.owner)], item.site.fqn
        if item.site.owner is not None:
            place = item.site.owned_fqn
        filled.append(fill(item, made, place, rules, live))
        check_supply(item)
    left = {i: carry_state(item, live) for i, item in enumerate(built)}
    inside = [part for item in built for part in item.replaced_parts]
    replacements = grouped(
        [
            *((s.fqn, s.original, s.rule) for s in sites.sites),
            *((fqn, noted.original, noted.rule) for fqn, noted in inside),
        ]
    )
    counts = counts_of(rules, replacements)
    unplaced = sum(len(c.unplaced) for c in converted.values())
    dropped = dropped_inside(built, filled, rules)
    findings = [
        *container_findings(built, dropped, sites),
        *key_findings(rules, counts, sites),
        *tensor_findings(built, filled, unplaced, dropped),
        *frozen_findings(built, filled),
        *tie_findings(sites.parts, built),
        *part_findings(built, parts),
        *left_findings(built, left),
        *optimizer_findings(sites.parts.values(), built),
        *conversion_findings(model, conversions),
    ]
    return Prepared(sites, built, filled, converted, replacements, counts, ordered(findings))


def _build(
    model: nn.Module,
    sites: Sites,
    rules: PatchMapping,
    conversions: Conversions,
    snapshots: list[Snapshot],
    live: frozenset[int],
    *,
    clone: bool,
) -> tuple[list[Built], list[Parts], dict[int, Converted]]:
    built = build_modules(sites.sites, rules, snapshots, clone=clone)
    _connect(built)
    parts = [keep_parts(item, rules, live) for item in built]
    return built, parts, _convert(model, built, conversions)


def _connect(built: list[Built]) -> None:
    """Let the new modules share with the rest of the model what the old ones do."""
    new_of = {id(item.site.module): item.module for item in built}
    for item in built:
        if item.skeleton is not None and item.site.owner is not None:
            shared_parts(item, item.site.owner, item.skeleton, new_of)


def _convert(
    model: nn.Module, built: list[Built], conversions: Conversions
) -> dict[int, Converted]:
    """Run conversions for each owner once; the key is the owner's id."""
    owners = {id(item.site.owner): item.site.owner for item in built}
    converted = {}
    for number, owner in owners.items():
        items = [b for b in built if b.site.owner is owner and not b.finished]
        if not items or (not conversions and all(item.cloned for item in items)):
            # A clone has the layout that its original has, however the checkpoint is laid out.
            converted[number] = NOTHING
        elif owner is None:
            transforms = conversions.get(type(model).__name__, [])
            converted[number] = convert_tensors(None, model, items, transforms)
        else:
            find = functools.partial(weight_transforms, owner, legacy=False)
            frame = Frame(PatchMapping(), conversions=conversions)
            transforms = under(frame, find) if conversions else without_scopes(find)
            converted[number] = convert_tensors(owner, owner, items, transforms)
    return converted
