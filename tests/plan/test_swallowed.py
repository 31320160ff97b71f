"""PL107 tells of replacements that build nothing of what their originals hold, and of no others."""

from __future__ import annotations

import pytest
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertSelfAttention,
    BertSelfOutput,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import patchlab
from tests.toys import bert_config, llama_config


class Bare(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states, None


class BareSubclass(BertAttention):
    """Is one by its bases, and leaves out the constructor that builds what it holds."""

    def __init__(self, *args, **kwargs):
        nn.Module.__init__(self)

    forward = Bare.forward


class Subclass(BertAttention):
    forward = Bare.forward


class SomeOfIt(Bare):
    def __init__(self, config, *args, **kwargs):
        super().__init__()
        self.output = BertSelfOutput(config)


class InOtherPlaces(Bare):
    def __init__(self, config, *args, **kwargs):
        super().__init__()
        self.inner = nn.ModuleList([BertSelfAttention(config)])


class OthersInItsPlaces(Bare):
    def __init__(self, config, *args, **kwargs):
        super().__init__()
        self.self = nn.Linear(config.hidden_size, config.hidden_size)


def swallowed(config, mapping):
    return [f for f in patchlab.preview(config, mapping).findings if f.code == "PL107"]


KEYS = ["BertAttention", "^BertAttention$", "Bert(?!Self)Attention"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("replacement", [Bare, BareSubclass])
def test_what_builds_nothing_is_told_whatever_it_inherits_and_however_it_is_matched(
    key, replacement
):
    (found,) = swallowed(bert_config(), {key: replacement})

    assert (found.severity, found.subject) == ("warning", "BertAttention")
    assert "self (BertSelfAttention), output (BertSelfOutput)" in found.message
    assert "in 2 places, first at 'encoder.layer.0.attention'" in found.message


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("replacement", [Subclass, SomeOfIt, InOtherPlaces, OthersInItsPlaces])
def test_what_builds_any_of_it_is_not_told(key, replacement):
    assert swallowed(bert_config(), {key: replacement}) == []


def test_modules_in_a_list_are_held_too():
    (found,) = swallowed(bert_config(), {"BertEncoder": Bare})

    assert "layer.0 and 1 more (BertLayer)" in found.message


def test_a_replacement_that_builds_another_replacement_builds_something():
    class MyMLP(LlamaMLP):
        def forward(self, x):
            return super().forward(x)

    class MyLayer(nn.Module):
        def __init__(self, config, layer_idx):
            super().__init__()
            self.feed_forward = MyMLP(config)

        def forward(self, hidden_states, *args, **kwargs):
            return self.feed_forward(hidden_states)

    assert swallowed(llama_config(), {"LlamaDecoderLayer": MyLayer}) == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (llama_config(), "LlamaAttention"),  # holds torch's own modules alone
        (transformers.BloomConfig(n_layer=1), "BloomMLP"),  # holds an activation
    ],
)
def test_what_holds_no_weights_of_transformers_own_swallows_nothing(config, key):
    assert swallowed(config, {key: Bare}) == []


def test_of_a_container_in_the_tree_the_one_finding_is_that_it_is_one():
    findings = patchlab.preview(bert_config(), {"^Bert(Self)?Attention$": Bare}).findings

    assert {f.code for f in findings} & {"PL101", "PL107"} == {"PL101"}


def test_of_a_container_under_another_config_it_is_told_what_is_swallowed_here():
    config = transformers.ConvBertConfig(num_hidden_layers=1)
    findings = patchlab.preview(config, {".*Layer": Bare}).findings
    told = {f.code: f for f in findings}

    assert told["PL101"].severity == "warning"
    assert "can be a container: under another config" in told["PL101"].message
    assert "attention (ConvBertAttention)" in told["PL107"].message


def test_places_that_hold_nothing_are_not_counted():
    """Of Segformer's attentions only those with a reduction hold a module of its own."""
    (found,) = swallowed(transformers.SegformerConfig(), {"SegformerAttention": Bare})

    assert "in 6 places" in found.message


def test_a_layer_that_keeps_its_parts_is_not_told():
    class Same(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states

    assert swallowed(llama_config(), {"LlamaDecoderLayer": Same}) == []
