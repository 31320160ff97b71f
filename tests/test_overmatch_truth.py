"""What is said about containers, against what was seen when the models were built.

`data/overmatch-truth.json.gz` holds, for 356 config classes of transformers 5.24.0 and 13 patterns,
which classes a model built with default configs has and which of them hold which; the roots of the
models are among the matched classes and never among the containers. Architectures that the
installed transformers does not have are passed over, and no less than three quarters must be left.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.plan.containers import Container, find_containers, matched_numbers, observed_pairs
from patchlab.plan.suggest import suggest_key

TRUTH = json.loads(
    gzip.decompress(
        Path(__file__).with_name("data").joinpath("overmatch-truth.json.gz").read_bytes()
    )
)


class Replacement(nn.Module):
    """Takes the place of anything."""


@dataclass(frozen=True)
class Case:
    """One pattern on one architecture: what was seen, and what the source says."""

    pattern: str
    config: str
    matched: frozenset[str]
    containers: frozenset[str]
    known: frozenset[str]
    said: dict[str, Container]

    @property
    def said_of_built(self) -> set[str]:
        """What is said of the classes that the built models have: of this config, not of any."""
        return {
            name
            for name, container in self.said.items()
            if name in self.matched and self.matched.intersection(container.inner)
        }


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(progress=False)


@pytest.fixture(scope="module")
def cases(catalog) -> list[Case]:
    return list(cases_of(catalog))


def cases_of(catalog: Catalog) -> Iterator[Case]:
    for pattern, by_config in TRUTH.items():
        mapping = PatchMapping.of({pattern: Replacement})
        numbers = matched_numbers(mapping, catalog)
        everywhere = find_containers(mapping, catalog)
        for config, seen in by_config.items():
            if config not in catalog.configs:
                continue
            parts = catalog.architecture(config)
            scope = {catalog[n].full_name for n in parts}
            yield Case(
                pattern,
                config,
                frozenset(seen["matched"]),
                frozenset(outer for outer, _, _ in seen["containers"]),
                frozenset(catalog.names[n] for n in parts if n in numbers),
                {c.class_name: c for c in everywhere if c.full_name in scope},
            )


def test_most_of_the_truth_is_about_installed_architectures(cases):
    """Guards the tests below, which say nothing of what they pass over."""
    assert len(cases) > 0.75 * sum(map(len, TRUTH.values()))


# The model was built around a config that is not the default: its decoder is a GPT-2.
BUILT_OTHERWISE = {("VisionEncoderDecoderConfig", "GPT2LMHeadModel")}


def test_every_container_that_was_seen_is_said_to_be_one(cases):
    """Recall: 308 of 309 from the source alone; the one other takes the built tree."""
    missed = {
        (case.config, name) for case in cases for name in case.containers if name not in case.said
    }

    assert missed <= BUILT_OTHERWISE


def test_container_from_the_tree_is_found_where_the_default_config_has_another(catalog):
    import transformers

    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(num_hidden_layers=1), transformers.GPT2Config(n_layer=1)
    )
    with torch.device("meta"):
        model = transformers.VisionEncoderDecoderModel(config)
    mapping = PatchMapping.of({".*Model$": Replacement})
    modules = [(n, f"{type(m).__module__}.{type(m).__name__}") for n, m in model.named_modules()]

    found = find_containers(
        mapping,
        catalog,
        scope=[full_name for name, full_name in modules if name],
        observed=observed_pairs(modules, mapping),
    )

    assert {(c.class_name, c.evidence) for c in found} == {("GPT2LMHeadModel", "built")}


def test_few_classes_are_said_to_be_containers_and_are_none(cases):
    """False alarms: at most 3 in 100, of the classes that the built models have."""
    said = sum(len(case.said_of_built) for case in cases)
    wrong = sum(len(case.said_of_built - case.containers) for case in cases)

    assert said > 200
    assert wrong <= 0.03 * said


def test_of_other_configs_little_more_is_said(cases):
    """What only a flag or another part would bring in: at most 10 in 100 of what is said."""
    said = sum(len(case.said) for case in cases)
    further = sum(len(set(case.said) - case.containers) for case in cases)

    assert further <= 0.10 * said


def test_classes_that_were_seen_are_known_to_the_source(cases):
    """At most 1 in 100 of the matched classes is missing; roots are no parts of themselves."""
    missing = total = 0
    for case in cases:
        models = {name for name in case.matched if name not in case.known}
        total += len(case.matched)
        missing += len(models & case.containers) + sum(
            not is_model_of(name, case.config) for name in models
        )

    assert missing <= 0.01 * total


def is_model_of(name: str, config: str) -> bool:
    catalog = load_catalog()
    return any(catalog.names[number] == name for number in catalog.configs[config].models)


def test_suggestions_keep_the_leaves_and_drop_the_containers(cases, catalog):
    """Right: matches every class seen that is no container, and no container; 95 in 100 or more."""
    trapped = [case for case in cases if case.containers]
    right, wrong = 0, []
    for case in trapped:
        containers = case.containers | set(case.said)
        matched = case.known | case.matched
        found = suggest_key(case.pattern, matched, containers, catalog)
        leaves = case.matched - case.containers
        if found is not None and is_right(found.key, leaves, case.containers):
            right += 1
        else:
            wrong.append((case.pattern, case.config, found))

    assert len(trapped) > 200
    assert right >= 0.95 * len(trapped), wrong


def is_right(key: str, leaves: frozenset[str], containers: frozenset[str]) -> bool:
    rule = PatchRule(key, Replacement)
    return all(map(rule.matches, leaves)) and not any(map(rule.matches, containers))


def test_check_of_suggestions_can_fail():
    """Guards the test above."""
    leaves, containers = frozenset({"BertSelfAttention"}), frozenset({"BertAttention"})

    assert is_right("^BertSelfAttention$", leaves, containers)
    assert not is_right(".*Attention", leaves, containers)
    assert not is_right("^Bert$", leaves, containers)


# --- truth made afresh ----------------------------------------------------------------------------

# Builds without extra packages, with what the default config lacks where it lacks something.
FRESH: dict[str, dict[str, object]] = {
    "ASTConfig": {},
    "CvtConfig": {},
    "BertConfig": {},
    "BigBirdConfig": {},
    "DPRConfig": {},
    "FalconConfig": {},
    "LongT5Config": {},
    "LukeConfig": {},
    "MarkupLMConfig": {},
    "NemotronConfig": {"head_dim": 128, "num_key_value_heads": 8},
    "ViTMSNConfig": {},
    "Wav2Vec2ConformerConfig": {},
}


def seen_in(config: str, options: dict[str, object], pattern: str) -> set[tuple[str, str]]:
    """Build the base model on the meta device and return its (container, inner class) pairs."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, config)(**options))
    rule = PatchRule(pattern, Replacement)
    pairs: set[tuple[str, str]] = set()
    for fqn, module in model.named_modules():
        if fqn and rule.matches(type(module).__name__):
            pairs |= {
                (type(module).__name__, type(inner).__name__)
                for inner in module.modules()
                if type(inner).__name__ != type(module).__name__
                and rule.matches(type(inner).__name__)
                and type(inner).__module__.startswith("transformers.")
            }
    return pairs


@pytest.mark.parametrize("config", sorted(FRESH))
@pytest.mark.parametrize("pattern", [".*Attention", ".*Embeddings?", ".*Layer$"])
def test_fresh_tree_holds_only_containers_that_were_foretold(catalog, config, pattern):
    pairs = seen_in(config, FRESH[config], pattern)
    mapping = PatchMapping.of({pattern: Replacement})
    scope = [catalog[n].full_name for n in catalog.architecture(config)]

    said = {c.class_name: set(c.inner) for c in find_containers(mapping, catalog, scope=scope)}

    assert {outer for outer, _ in pairs} <= set(said)
    assert all(inner in said[outer] for outer, inner in pairs)


@pytest.mark.parametrize("config", sorted(set(FRESH) & set(TRUTH[".*Attention"])))
def test_recorded_truth_is_what_a_fresh_tree_shows(config):
    """Guards the data: it can be made again."""
    recorded = {(outer, inner) for outer, inner, _ in TRUTH[".*Attention"][config]["containers"]}

    assert seen_in(config, FRESH[config], ".*Attention") <= recorded
