"""Containers: what counts as one, from a tree, from the source, and under which rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from patchlab.mapping.rules import PatchMapping
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.plan.containers import (
    ObservedPair,
    find_containers,
    matched_numbers,
    observed_pairs,
)

BERT = "transformers.models.bert.modeling_bert"


class Replacement(nn.Module):
    """Takes the place of anything."""


class LayerOfItsOwn(BertLayer):
    """Builds everything that BertLayer builds."""


class Other(nn.Module):
    """Takes the place of something else."""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(progress=False)


def modules_of(model: nn.Module) -> list[tuple[str, str]]:
    return [(n, f"{type(m).__module__}.{type(m).__name__}") for n, m in model.named_modules()]


def bert_containers(mapping, catalog, **options):
    scope = [c.full_name for c in catalog if c.python_module == BERT]
    return find_containers(PatchMapping.of(mapping), catalog, scope=scope, **options)


def test_attention_of_bert_is_a_container_of_both_kinds(catalog):
    (found,) = bert_containers({".*Attention": Replacement}, catalog)

    assert found.class_name == "BertAttention"
    assert found.key == ".*Attention"
    assert found.inner == ("BertCrossAttention", "BertSelfAttention")
    assert (found.path, found.example) == ("self", "BertCrossAttention")
    assert found.evidence == "static"
    assert found.full_name == f"{BERT}.BertAttention"


def test_exact_name_matches_only_itself(catalog):
    assert bert_containers({"BertAttention": Replacement}, catalog) == ()


def test_built_tree_gives_the_path_and_the_evidence(catalog):
    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=2))
    mapping = PatchMapping.of({".*Attention": Replacement})

    (found,) = bert_containers(
        mapping, catalog, observed=observed_pairs(modules_of(model), mapping)
    )

    assert (found.path, found.example, found.evidence) == ("self", "BertSelfAttention", "built")
    # The tree has no cross attention; under another config the same class would hold one.
    assert found.inner == ("BertCrossAttention", "BertSelfAttention")


def test_pairs_go_through_holders_that_no_rule_fits():
    with torch.device("meta"):
        model = BertModel(BertConfig(num_hidden_layers=2))
    mapping = PatchMapping.of({"BertEncoder": Replacement, "BertSelfAttention": Other})

    pairs = observed_pairs(modules_of(model), mapping)

    assert pairs == (
        ObservedPair(f"{BERT}.BertEncoder", f"{BERT}.BertSelfAttention", "layer.0.attention.self"),
    )


def test_siblings_with_a_common_beginning_hold_nothing_of_each_other():
    mapping = PatchMapping.of({"Outer|Inner": Replacement})

    assert observed_pairs([("a", "m.Outer"), ("ab", "m.Inner")], mapping) == ()
    assert observed_pairs([("a", "m.Outer"), ("a.b", "m.Inner")], mapping) != ()


def test_root_holds_everything_below_it():
    mapping = PatchMapping.of({"Outer|Inner": Replacement})

    assert observed_pairs([("", "m.Outer"), ("b", "m.Inner")], mapping) == (
        ObservedPair("m.Outer", "m.Inner", "b"),
    )


def test_class_that_another_rule_replaces_is_dropped_with_its_container(catalog):
    mapping = {"BertLayer": Replacement, "BertSelfAttention": Other}

    (found,) = bert_containers(mapping, catalog)

    assert (found.class_name, found.key, found.inner) == (
        "BertLayer",
        "BertLayer",
        ("BertSelfAttention",),
    )


def test_replacement_that_subclasses_the_container_drops_nothing_of_other_rules(catalog):
    mapping = {"BertLayer": LayerOfItsOwn, "BertSelfAttention": Other}

    assert bert_containers(mapping, catalog) == ()


def test_subclass_still_holds_what_its_own_rule_replaces(catalog):
    found = bert_containers({"Bert(Layer|SelfAttention)$": LayerOfItsOwn}, catalog)

    assert [c.class_name for c in found] == ["BertLayer"]


def test_class_that_a_rule_replaces_by_itself_is_not_matched(catalog):
    mapping = PatchMapping.of({"BertLayer": BertLayer})

    assert matched_numbers(mapping, catalog) == {}


def test_class_unknown_to_the_catalog_counts_when_it_was_seen(catalog):
    mapping = PatchMapping.of({"^(Outer|Inner)$": Replacement})

    found = find_containers(
        mapping, catalog, observed=[ObservedPair("remote.Outer", "remote.Inner", "x.0")]
    )

    assert [(c.class_name, c.inner, c.path, c.evidence) for c in found] == [
        ("Outer", ("Inner",), "x.0", "built")
    ]


def test_scope_bounds_the_containers_and_not_what_they_hold(catalog):
    mapping = PatchMapping.of({".*Attention": Replacement})

    found = find_containers(mapping, catalog, scope=[f"{BERT}.BertAttention"])

    assert [c.class_name for c in found] == ["BertAttention"]
    assert len(find_containers(mapping, catalog)) > 100


@pytest.mark.parametrize("config", ["BertConfig", "T5Config", "ViTMAEConfig", "SamConfig"])
def test_every_pair_seen_in_a_tree_is_known_to_the_source(catalog, config):
    import transformers

    with torch.device("meta"):
        model = AutoModel.from_config(getattr(transformers, config)())
    mapping = PatchMapping.of({".*": Replacement})
    pairs = observed_pairs(modules_of(model), mapping)
    named = {c.full_name: c.number for c in catalog}

    missing = [
        (pair.outer, pair.inner)
        for pair in pairs
        if pair.outer in named
        and pair.inner in named
        and not catalog.containment.closure(named[pair.outer]) >> named[pair.inner] & 1
        # Activations come from a table of instances (ACT2FN), which the catalog leaves out.
        and not pair.inner.startswith("transformers.activations.")
    ]

    assert pairs
    assert missing == []


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        ("MimiDecoder", "MimiEncoder"),  # an index is set on each convolution of the encoder
        ("PocketTTSAudioTokenizerConv1d", "PocketTTSAudioTokenizerEncoder"),
        ("Mask2FormerPixelDecoder", "SwinEncoder"),  # the decoder is given the encoder's channels
        ("OneFormerPixelDecoder", "SwinEncoder"),
        ("DetrFrozenBatchNorm2d", "ResNetBackbone"),  # a norm copies another's weight
        ("DFineFrozenBatchNorm2d", "HGNetV2Backbone"),
        ("UperNetHead", "ResNetBackbone"),
        ("MaskFormerTransformerModule", "MaskFormerPixelLevelModule"),
        ("ClapAudioStage", "ClapAudioPatchEmbed"),
    ],
)
def test_class_holds_no_module_of_which_it_reads_a_number(reader, read, catalog):
    mapping = PatchMapping.of({f"^({reader}|{read})$": Replacement})

    assert {catalog.names[n] for n in matched_numbers(mapping, catalog)} == {reader, read}
    assert reader not in [c.class_name for c in find_containers(mapping, catalog)]


def test_part_that_is_taken_out_of_a_model_is_held_and_the_model_is_not(catalog):
    mapping = PatchMapping.of({"^XcodecModel$|^Dac(Model|Encoder|Decoder)$": Replacement})

    inner = {c.class_name: c.inner for c in find_containers(mapping, catalog)}

    assert inner["XcodecModel"] == ("DacDecoder", "DacEncoder")
