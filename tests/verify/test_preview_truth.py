"""What previews say of containers, against what was seen in models built from default configs.

A fixed sample of the truth in `data/overmatch-truth.json.gz` (transformers 5.24.0): sixty config
classes, every pattern that the truth has for them. The unpatched skeleton is built for each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import transformers
from torch import nn

from patchlab.mapping.rules import PatchMapping
from patchlab.model.catalog import load_catalog
from patchlab.model.skeleton import model_builder
from patchlab.model.tree import module_tree
from patchlab.plan.evidence import Evidence
from patchlab.plan.findings import Finding
from patchlab.plan.overmatch import containers
from patchlab.verify.preview import plan_for
from tests.test_overmatch_truth import TRUTH

CONFIGS = 60


class Anything(nn.Module):
    pass


@dataclass(frozen=True)
class Case:
    config: str
    pattern: str
    matched: frozenset[str]
    truth: frozenset[str]
    counts: dict[str, int]
    found: tuple[Finding, ...]

    @property
    def said(self) -> set[str]:
        return {finding.subject for finding in self.found}

    @property
    def suggestion(self) -> str:
        return next((f.suggestion for f in self.found if f.subject in self.truth), "")


def sample() -> list[str]:
    """Config classes that a plain call builds, those with a trap twice as likely as others."""
    trapped = {
        c for by_config in TRUTH.values() for c, seen in by_config.items() if seen["containers"]
    }
    names = sorted(
        {c for by_config in TRUTH.values() for c in by_config if hasattr(transformers, c)}
    )
    weighted = names + sorted(trapped & set(names))
    return list(dict.fromkeys(random.Random(5).sample(weighted, CONFIGS + 30)))


def cases_of(names: list[str]) -> Iterator[Case]:
    catalog, built = load_catalog(progress=False), 0
    for name in names:
        if built == CONFIGS:
            return
        try:
            build, config = model_builder(getattr(transformers, name)())
            model = build(config)
        except Exception:  # noqa: BLE001  (its default config wants a hand; the next one is taken)
            continue
        built += 1
        tree = module_tree(model)
        for pattern, by_config in TRUTH.items():
            if name in by_config:
                mapping = PatchMapping.of({pattern: Anything})
                plan = plan_for(tree, mapping)
                evidence = Evidence(mapping, plan, model, tree, None, None, catalog)
                yield Case(
                    name,
                    pattern,
                    frozenset(by_config[name]["matched"]),
                    frozenset(held[0] for held in by_config[name]["containers"]),
                    {r.original.__name__: len(r.fqns) for r in plan},
                    tuple(containers(evidence)),
                )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = list(cases_of(sample()))
    assert len({case.config for case in found}) == CONFIGS
    assert sum(bool(case.truth) for case in found) >= 25
    return found


def test_every_container_in_a_built_model_is_said(cases):
    missed = [(c.config, c.pattern, c.truth & set(c.counts) - c.said) for c in cases]
    assert [miss for miss in missed if miss[2]] == []


def test_at_most_three_in_a_hundred_are_said_in_vain(cases):
    said = sum(len(c.said) for c in cases)
    wrong = [(c.config, c.pattern, c.said - c.truth) for c in cases if c.said - c.truth]
    assert sum(len(names) for *_, names in wrong) <= 0.03 * said, wrong


def test_suggestions_keep_every_leaf_and_drop_every_container(cases):
    trapped = [c for c in cases if c.truth & set(c.counts) and c.matched - c.truth]
    right = [
        c
        for c in trapped
        if c.suggestion
        and all(re.search(c.suggestion, name) for name in c.matched - c.truth)
        and not any(re.search(c.suggestion, name) for name in c.truth)
    ]
    wrong = [(c.config, c.pattern, c.suggestion) for c in trapped if c not in right]
    assert len(right) >= 0.95 * len(trapped), wrong
