"""A constructor that can take no call of what it replaces is told before a block runs."""

from __future__ import annotations

import pytest
import transformers
from torch import nn
from transformers.models.bert import modeling_bert  # noqa: F401  (what a pattern fits besides)
from transformers.models.llama.modeling_llama import LlamaAttention

import patchlab
from patchlab.errors import FindingsError
from patchlab.mapping.rules import PatchMapping
from patchlab.plan.mismatches import loaded_mismatches
from tests.toys import llama_config


def told(key, replacement):
    return loaded_mismatches(PatchMapping.of({key: replacement}))


class NoLayerIndex(nn.Module):
    def __init__(self, config):
        super().__init__()


class OneMore(LlamaAttention):
    def __init__(self, config, layer_idx, scale):
        super().__init__(config, layer_idx)


class AnyArguments(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


@pytest.mark.parametrize("replacement", [NoLayerIndex, OneMore])
def test_a_constructor_that_takes_too_few_or_too_many_is_an_error(replacement):
    (finding,) = told("^LlamaAttention$", replacement)
    assert (finding.code, finding.severity) == ("PL201", "error")
    assert "LlamaAttention is built with (config, layer_idx)" in finding.message
    with pytest.raises(TypeError), patchlab.patched({"^LlamaAttention$": replacement}):
        transformers.LlamaModel(llama_config())


@pytest.mark.parametrize("replacement", [AnyArguments, LlamaAttention])
def test_a_constructor_that_some_call_fits_is_left_alone(replacement):
    assert told("^(Llama|Mistral)Attention$", replacement) == ()


def test_a_pattern_with_one_place_that_fits_is_left_alone():
    """BertAttention is built with a config and no more, unlike LlamaAttention."""
    assert told("^(Llama|BertSelf|Bert)Attention$", NoLayerIndex) == ()


def test_a_strict_scope_does_not_run_its_block():
    ran = []
    strict = patchlab.patched({"LlamaAttention": NoLayerIndex}, on_finding="error")
    with pytest.raises(FindingsError, match="PL201"), strict:
        ran.append(True)
    assert ran == []
