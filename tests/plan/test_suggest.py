"""Suggestions: the narrower key keeps what was meant, drops the containers, and adds nothing."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.plan.containers import find_containers, matched_numbers
from patchlab.plan.suggest import Suggestion, alternatives, suggest_key
from patchlab.plan.survey import survey


class Replacement(nn.Module):
    """Takes the place of anything."""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(progress=False)


def suggestion_for(key: str, config: str, catalog: Catalog) -> Suggestion | None:
    mapping = PatchMapping.of({key: Replacement})
    numbers = catalog.architecture(config)
    matched = [catalog.names[n] for n in numbers if n in matched_numbers(mapping, catalog)]
    scope = [catalog[n].full_name for n in numbers]
    containers = [c.class_name for c in find_containers(mapping, catalog, scope=scope)]
    return suggest_key(key, matched, containers, catalog)


def faults_of(found: Suggestion, key: str, catalog: Catalog) -> list[str]:
    """Say what is wrong with a suggestion, over every name that transformers has."""
    narrow, wide = PatchRule(found.key, Replacement), PatchRule(key, Replacement)
    faults = [f"does not keep {name}" for name in found.keeps if not narrow.matches(name)]
    faults += [f"does not drop {name}" for name in found.drops if narrow.matches(name)]
    names = {*catalog.names, *catalog.other_names}
    faults += [f"adds {n}" for n in sorted(names) if narrow.matches(n) and not wide.matches(n)]
    return faults


@pytest.mark.parametrize(
    ("key", "config", "expected"),
    [
        (".*Attention", "BertConfig", "^Bert(?:Cross|Self)Attention$"),
        (".*Attention", "T5Config", "^T5Attention$"),
        ("Attention$", "T5Config", "^T5Attention$"),
        (".*Block$", "SamConfig", "^SamMLPBlock$"),
    ],
)
def test_suggestion_is_the_short_key_that_a_person_would_write(catalog, key, config, expected):
    found = suggestion_for(key, config, catalog)

    assert found is not None
    assert found.key == expected
    assert found.elsewhere == ()


@pytest.mark.parametrize("key", [".*Attention", ".*Embeddings?", ".*Layer$"])
def test_each_suggestion_of_the_survey_keeps_drops_and_adds_nothing(catalog, key):
    """For every model type with a container there is a key, and it is right over all names."""
    found = survey(key)
    suggestions = found.suggestions(key)

    with_leaf = {
        row.model_type
        for row in found.rows
        if row.container is None and row.model_type in {c.model_type for c in holding(found)}
    }
    assert set(suggestions) == with_leaf
    assert {m: f for m, s in suggestions.items() if (f := faults_of(s, key, catalog))} == {}


def holding(found):
    return [row for row in found.rows if row.container is not None]


def test_check_of_suggestions_can_fail(catalog):
    """Guards the test above."""
    good = suggestion_for(".*Attention", "BertConfig", catalog)
    assert good is not None
    too_wide = Suggestion(".*", "names", good.keeps, good.drops)
    too_narrow = Suggestion("^Bert$", "names", good.keeps, good.drops)

    assert "does not drop BertAttention" in faults_of(too_wide, ".*Attention", catalog)
    assert "adds BertLayer" in faults_of(too_wide, ".*Attention", catalog)
    assert "does not keep BertSelfAttention" in faults_of(too_narrow, ".*Attention", catalog)


def test_suggestion_can_be_registered_as_it_stands(catalog):
    found = suggestion_for(".*Attention", "BertConfig", catalog)

    assert found is not None
    assert [rule.key for rule in PatchMapping.of({found.key: Replacement})] == [str(found)]


@pytest.mark.parametrize("key", [".*Attention", "Bert.*", ".*Encoder"])
def test_order_of_the_names_makes_no_difference(catalog, key):
    names = sorted({n for n in catalog.names if re.search(key, n) and n.startswith("Bert")})
    containers = names[::3]
    shuffled, drops = [*names], [*containers]
    random.Random(7).shuffle(shuffled)
    random.Random(8).shuffle(drops)

    assert suggest_key(key, names, containers, catalog) == suggest_key(
        key, shuffled, drops, catalog
    )


def test_ending_begins_with_a_whole_word(catalog):
    """Of a few names with nothing short in common, no single letter or digit is made an ending."""
    found = suggestion_for(".*Model$", "Sam3VideoConfig", catalog)

    assert found is not None
    assert not re.search(r"[(|](?:[A-Z0-9]|[0-9]\w*)[|)]", found.key)


@pytest.mark.parametrize(
    ("matched", "containers"),
    [
        (["BertAttention"], ["BertAttention"]),  # nothing is left
        (["BertSelfAttention"], []),  # nothing to drop
        ([], []),
    ],
)
def test_nothing_is_suggested_where_nothing_would_change(catalog, matched, containers):
    assert suggest_key(".*Attention", matched, containers, catalog) is None


def test_built_classes_are_told_from_those_of_other_configs(catalog):
    names = ["BertAttention", "BertSelfAttention", "BertCrossAttention"]

    found = suggest_key(
        ".*Attention", names, names[:1], catalog, built_classes={"BertSelfAttention", "BertLayer"}
    )

    assert found is not None
    assert found.keeps == ("BertCrossAttention", "BertSelfAttention")
    assert found.built == ("BertSelfAttention",)


def test_of_many_classes_those_of_the_tree_are_kept_where_a_key_for_all_is_long(catalog):
    names = sorted({n for n in catalog.names if n.startswith("Segformer")})
    containers = [n for n in names if n.endswith(("Model", "Layer", "Stage")) or "For" in n]
    built = {"SegformerDepthWiseConv", "SegformerDropPath"}

    for_all = suggest_key("Segformer.*", names, containers, catalog)
    for_these = suggest_key("Segformer.*", names, containers, catalog, built_classes=built)

    assert for_all is not None
    assert for_these is not None
    assert set(for_all.keeps) == set(names) - set(containers)
    assert for_these.key == "^Segformer(?:DepthWiseConv|DropPath)$"
    assert set(for_these.keeps) == set(for_these.built) == built


def test_other_architectures_that_the_key_reaches_are_named(catalog):
    leaves = [f"Bert{part}" for part in ("Output", "SelfOutput", "Intermediate", "Pooler")]

    found = suggest_key("^Bert", [*leaves, "BertLayer"], ["BertLayer"], catalog)

    assert found is not None
    reached = {catalog.model_type(n) for n, name in enumerate(catalog.names) if hits(found, name)}
    assert set(found.elsewhere) == reached - {"bert", ""}


def hits(found: Suggestion, name: str) -> bool:
    return PatchRule(found.key, Replacement).matches(name)


words = st.sampled_from(["Bert", "T5", "Self", "Cross", "Attention", "Layer", "MLP", "x", "V2"])
names = st.lists(words, min_size=1, max_size=4).map("".join)


@given(st.lists(names, min_size=1, max_size=6, unique=True), names)
def test_alternatives_match_the_names_and_nothing_else(listed, other):
    """For any names, the pattern written for them fits each in full, and no other name."""
    pattern = re.compile(f"^{alternatives(listed)}$")

    assert all(pattern.search(name) for name in listed)
    assert bool(pattern.search(other)) == (other in listed)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_suggestion_is_right_whatever_is_dropped(data):
    """For any key and any choice of containers among its matches, a suggestion has no fault."""
    catalog = load_catalog(progress=False)
    key = data.draw(st.sampled_from([".*Attention", "^Bert", ".*MLP$", "^T5", "Layer$"]))
    family = data.draw(st.sampled_from(["Bert", "T5", "Llama", "Sam", "Wav2Vec2"]))
    matched = sorted({n for n in catalog.names if re.search(key, n) and n.startswith(family)})
    drops = [name for name in matched if data.draw(st.booleans())]

    built = {name for name in matched if data.draw(st.booleans())}

    found = suggest_key(key, matched, drops, catalog, built_classes=built)

    assert (found is None) == (not drops or len(drops) == len(matched))
    if found is not None:
        assert faults_of(found, key, catalog) == []
        leaves = set(matched) - set(drops)
        assert built & leaves <= set(found.keeps) <= leaves
        assert set(found.keeps) == leaves or built & leaves == set(found.keeps)
