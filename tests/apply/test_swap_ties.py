"""Tied weights in a swap: kept tied, or told with what a save and a load then do."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import patchlab
from patchlab.errors import FindingWarning
from tests.toys import llama_config


class Head(nn.Linear):
    pass


class WrappedHead(nn.Module):
    @classmethod
    def from_original(cls, original):
        wrapped = cls()
        wrapped.proj = original
        return wrapped

    def forward(self, inputs):
        return self.proj(inputs)


class FreshHead(nn.Module):
    def __init__(self, in_features, out_features, bias):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, inputs):
        return inputs @ self.matrix.T


def only_head(cls):
    """Build a mapping for the head's own class, so that no other Linear is meant."""
    return {"LMHead": cls}


@pytest.fixture
def tied():
    class LMHead(nn.Linear):
        pass

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True)).eval()
    model.lm_head = LMHead(32, 64, bias=False)
    model.tie_weights()
    return model


def test_tied_head_stays_tied(tied):
    swapped = patchlab.swap(tied, only_head(Head))

    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert [finding.code for finding in swapped.findings] == ["PL304"]
    assert swapped.findings[0].severity == "info"


def test_tie_inside_of_what_is_replaced_is_no_finding():
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=64,
    )
    model = transformers.BartForConditionalGeneration(config)
    whole, inner = (transformers.BartForConditionalGeneration, transformers.BartModel)

    for cls, severities in ((whole, set()), (inner, {"info"})):
        with patchlab.swap(model, {cls.__name__: type("Mine", (cls,), {})}) as swapped:
            assert {finding.severity for finding in swapped.findings} == severities


def test_head_that_wraps_the_tied_weight_is_told_to_lose_it_on_reload(tied):
    with pytest.warns(FindingWarning, match=r"PL304 .*'proj\.weight'.*without the patch"):
        patchlab.swap(tied, only_head(WrappedHead))

    assert tied.lm_head.proj.weight is tied.model.embed_tokens.weight


def test_head_that_breaks_the_tie_is_told_how_to_untie(tied):
    with pytest.warns(FindingWarning) as told:
        patchlab.swap(tied, only_head(FreshHead))

    assert any("tie_word_embeddings = False" in str(w.message) for w in told)
