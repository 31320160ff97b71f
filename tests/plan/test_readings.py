"""What a trapped key may have meant in the model at hand, and how a preview says it."""

from __future__ import annotations

import re

import pytest
import transformers
from torch import nn

import patchlab
from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.catalog import load_catalog
from patchlab.model.skeleton import model_builder
from patchlab.model.tree import module_tree
from patchlab.plan.evidence import Evidence
from patchlab.plan.overmatch import containers
from patchlab.plan.readings import Readings, kind_of, readings_of
from patchlab.plan.suggest import READABLE
from patchlab.verify.preview import plan_for


class Mine(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


def evidence_of(config, key: str) -> Evidence:
    build, config = model_builder(config)
    model = build(config)
    tree, mapping = module_tree(model), PatchMapping.of({key: Mine})
    catalog = load_catalog(progress=False)
    return Evidence(mapping, plan_for(tree, mapping), model, tree, None, None, catalog)


# Small, and such that each key matches containers among other classes.
DEBERTA = transformers.DebertaConfig(num_hidden_layers=1)
WAV2VEC2 = transformers.Wav2Vec2Config(num_hidden_layers=2)
MOSHI = transformers.MoshiConfig(num_hidden_layers=1)
SEGFORMER = transformers.SegformerConfig()
LED = transformers.LEDConfig(encoder_layers=1, decoder_layers=1)
BERT = transformers.BertConfig(num_hidden_layers=1)
CONVBERT = transformers.ConvBertConfig(num_hidden_layers=1)
DINO = transformers.DINOv3ViTConfig(num_hidden_layers=1)
COHERE = transformers.CohereConfig(num_hidden_layers=1)
SPEECHT5 = transformers.SpeechT5Config(encoder_layers=1, decoder_layers=1)
MIMI = transformers.MimiConfig(num_hidden_layers=1)
TRAPS = [
    (DEBERTA, "Deberta.*"),
    (WAV2VEC2, ".*Encoder"),
    (WAV2VEC2, "Wav2Vec2.*"),
    (MOSHI, "Moshi.*(MLP|Linear)"),
    (SEGFORMER, "Segformer.*"),
    (LED, ".*Encoder"),
    (LED, ".*Attention"),
    (BERT, ".*Attention"),
    (BERT, "Bert.*"),
    (CONVBERT, ".*Layer"),
    (DINO, ".*Layer"),
    (COHERE, "Cohere.*"),
    (SPEECHT5, ".*Encoder"),
    (MIMI, "Mimi.*Layer|Mimi.*Transformer"),
    (MIMI, "Mimi.*(Layer|Transformer)"),
]
by_trap = pytest.mark.parametrize(
    ("config", "key"), TRAPS, ids=[f"{type(c).__name__}-{k}" for c, k in TRAPS]
)


@by_trap
def test_the_suggestion_replaces_something_in_the_tree_and_traps_nothing_there(config, key):
    """For any trapped key: it fits what the key fits, and no module inside another."""
    found = readings_of(evidence_of(config, key), key)

    after = evidence_of(config, found.key)
    replaced = set(after.plan.fqns)
    assert replaced
    assert replaced <= set(evidence_of(config, key).plan.fqns)
    assert [c for c in after.containers if c.evidence == "built"] == []


@by_trap
def test_the_advice_is_said_once_for_a_key_and_in_the_finding_that_is_shown_first(config, key):
    findings = [f for f in patchlab.preview(config, {key: Mine}).findings if f.code == "PL101"]
    advice = readings_of(evidence_of(config, key), key).advice

    assert [advice in finding.message for finding in findings] == [
        True,
        *(False for _ in findings[1:]),
    ]
    assert len({finding.suggestion for finding in findings}) == 1
    assert findings[0].suggestion


@by_trap
def test_a_key_in_the_text_is_one_that_can_be_read_and_registered(config, key):
    advice = readings_of(evidence_of(config, key), key).advice

    for said in re.findall(r"'([^']+)'", advice):
        PatchRule(said, Mine)
        assert len(said) <= 2 * READABLE


@pytest.mark.parametrize(
    ("config", "key", "advice"),
    [
        (BERT, ".*Attention", "Use '^Bert(?:Cross|Self)Attention$'."),
        (
            WAV2VEC2,
            ".*Encoder",
            "Use '^Wav2Vec2EncoderLayer(?:StableLayerNorm)?$' for the inner modules, or "
            "'.*Encoder$' for the outer ones.",
        ),
        (
            DINO,
            ".*Layer",
            "Use '^DINOv3ViTLayerScale$' for the inner modules, or '.*Layer$' for the outer ones.",
        ),
        (
            MIMI,
            "Mimi.*Layer|Mimi.*Transformer",
            "Use '^MimiLayerScale$' for the inner modules, or 'Mimi.*Layer$' for the outer ones.",
        ),
        (
            MIMI,
            "Mimi.*(Layer|Transformer)",
            "Use '^MimiLayerScale$' for the inner modules, or 'Mimi.*(Layer|Transformer)$' for the "
            "outer ones.",
        ),
        (MIMI, "Mimi.*Layer$|Mimi.*Transformer", "Use '^MimiTransformerLayer$'."),
        (MOSHI, "Moshi.*(MLP|Linear)", "Use '^Moshi(?:GatingMLP|Linear)$'."),
        (CONVBERT, ".*Layer", "Use '^ConvBertLayer$'."),
        (
            DEBERTA,
            "Deberta.*",
            "Without the containers the key fits classes of several kinds. Name the ones you "
            "mean: DebertaIntermediate and DebertaLayerNorm (all of them: "
            "'^Deberta(?:Intermediate|LayerNorm)$').",
        ),
        (
            SEGFORMER,
            "Segformer.*",
            "Without the containers the key fits classes of several kinds. Name the ones you "
            "mean: SegformerDepthWiseConv, SegformerDropPath, SegformerOverlapPatchEmbeddings and "
            "SegformerSequenceReduction.",
        ),
    ],
)
def test_the_advice_is_what_a_person_would_say(config, key, advice):
    assert readings_of(evidence_of(config, key), key).advice == advice


@by_trap
def test_the_key_for_the_outer_modules_replaces_containers_and_traps_nothing(config, key):
    evidence = evidence_of(config, key)
    whole = readings_of(evidence, key).whole
    if key == ".*Encoder":
        assert whole  # guards the rest, which is about such keys alone
    if whole:
        after = evidence_of(config, whole)
        outer = {c.class_name for c in evidence.containers if c.evidence == "built"}
        assert outer & {r.original.__name__ for r in after.plan}
        assert [c for c in after.containers if c.evidence == "built"] == []


def test_models_around_the_one_at_hand_and_abstract_ones_are_not_kept():
    found = readings_of(evidence_of(SEGFORMER, "Segformer.*"), "Segformer.*")

    assert not re.search(found.key, "SegformerForImageClassification")
    assert not re.search(found.key, "SegformerPreTrainedModel")


@pytest.mark.parametrize(
    ("key", "kept"),
    [("Dac.*", False), ("DacModel|DacResidual.*", True), (".*Quantizer|.*Model$", True)],
)
def test_the_model_as_a_whole_is_kept_only_by_a_key_that_names_it(key, kept):
    """PL204 says what is wrong with replacing the root; here it is not meant at all."""
    evidence = evidence_of(transformers.DacConfig(), key)
    found = readings_of(evidence, key, also_drop=["DacResidualVectorQuantizer"])

    assert ("DacModel" in found.names) is kept
    assert bool(re.search(found.key, "DacModel")) is kept


def test_a_model_around_that_ends_in_the_keys_own_word_is_kept():
    key = ".*Encoder$"
    found = readings_of(evidence_of(transformers.DPRConfig(num_hidden_layers=1), key), key)

    assert re.search(found.key, "DPRContextEncoder")
    assert not re.search(found.key, "DPREncoder")


def test_a_class_of_another_config_is_kept_only_if_it_is_like_one_of_the_tree():
    found = readings_of(evidence_of(SPEECHT5, ".*Encoder"), ".*Encoder")

    assert found.key == "^SpeechT5EncoderLayer$"
    assert "SpeechT5FeatureEncoder" not in found.inner.keeps
    assert re.search(readings_of(evidence_of(BERT, ".*Attention"), ".*Attention").key, CROSS)


CROSS = "BertCrossAttention"  # only a decoder has one


def test_a_class_of_torch_is_no_class_to_keep():
    """nn.LayerNorm has the name of a class of transformers, and is never replaced."""
    found = readings_of(evidence_of(DINO, ".*Layer"), ".*Layer")

    assert "LayerNorm" not in found.inner.keeps


def test_a_class_that_only_another_config_makes_a_container_is_among_those_to_choose_from():
    found = readings_of(evidence_of(COHERE, "Cohere.*"), "Cohere.*")

    assert "CohereAttention" in found.names
    assert "CohereAttention" in found.advice


def test_an_exact_name_has_one_reading():
    assert readings_of(evidence_of(BERT, "BertAttention"), "BertAttention") == Readings(None)


def test_where_no_key_is_left_the_finding_says_what_to_look_for():
    mapping = PatchMapping.of({"BertLayer": Mine, "BertSelfAttention": Mine})
    build, config = model_builder(BERT)
    model = build(config)
    tree = module_tree(model)
    evidence = Evidence(
        mapping, plan_for(tree, mapping), model, tree, None, None, load_catalog(progress=False)
    )

    (found,) = containers(evidence)

    assert "Use a rule that does not match BertLayer" in found.message
    assert found.suggestion == ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BertSelfAttention", "Attention"),
        ("BrosTextEmbeddings", "Embedding"),
        ("BrosPositionalEmbedding1D", "Embedding"),
        ("Llama4VisionMLP2", "MLP"),
        ("Wav2Vec2FeatureEncoder", "Encoder"),
        ("x", "x"),
    ],
)
def test_the_kind_of_a_class_is_its_last_word(name, kind):
    assert kind_of(name) == kind
