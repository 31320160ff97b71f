"""Output comparisons: what differs is found where it begins, and what agrees is not."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab.errors import TargetError
from tests.toys import llama_config, tokens

INPUTS = {"input_ids": tokens()}


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config()).eval()


def chain(depth=4):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers)


def test_model_agrees_with_its_copy(llama):
    comparison = patchlab.compare_outputs(llama, copy.deepcopy(llama), INPUTS)

    assert comparison.ok
    assert comparison.first_divergence is None
    assert comparison.max_abs == 0
    assert comparison.rows[-1].fqn == ""
    assert all(row.max_abs == 0 for row in comparison.rows)


@settings(max_examples=8)
@given(st.integers(0, 3))
def test_first_divergence_is_the_module_that_was_changed(place):
    model = chain()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2 * place].weight[0, 0] += 0.5

    comparison = patchlab.compare_outputs(model, other, torch.ones(2, 4))

    assert not comparison.ok
    assert comparison.first_divergence.fqn == str(2 * place)
    assert [row.status for row in comparison.rows[: 2 * place]] == ["same"] * (2 * place)


def test_replacement_with_other_parts_is_compared_where_both_have_modules(llama):
    other = copy.deepcopy(llama)
    with patchlab.swap(
        other, {"LlamaAttention": FusedLlamaAttention}, conversions=llama_conversions()
    ):
        comparison = patchlab.compare_outputs(llama, other, INPUTS)

    status = {row.fqn: row.status for row in comparison.rows}
    assert comparison.ok
    assert status["model.layers.0.self_attn.q_proj"] == "only before"
    assert status["model.layers.0.self_attn.qkv_proj"] == "only after"
    assert status["model.layers.0.self_attn"] == "same"


def test_tolerance_is_that_of_the_dtype(llama):
    half = copy.deepcopy(llama).bfloat16()

    assert patchlab.compare_outputs(llama, half, INPUTS).ok
    noisy = copy.deepcopy(llama)
    with torch.no_grad():
        noisy.lm_head.weight *= 1.001
    assert not patchlab.compare_outputs(llama, noisy, INPUTS).ok


@pytest.mark.parametrize(
    ("wrong", "ok"), [(float("nan"), False), (float("inf"), False), (0.0, True)]
)
def test_not_a_number_on_one_side_is_a_difference(wrong, ok):
    model = chain()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].bias[0] += wrong

    assert patchlab.compare_outputs(model, other, torch.ones(2, 4)).ok is ok
    assert patchlab.compare_outputs(other, other, torch.ones(2, 4)).ok


def test_other_shape_is_told_and_not_compared():
    comparison = patchlab.compare_outputs(
        nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 5)), torch.ones(2, 4)
    )

    assert not comparison.ok
    assert comparison.rows[-1].status == "other shape"
    assert comparison.rows[-1].max_abs is None


def test_module_called_more_often_is_a_difference():
    class Twice(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.inner = nn.Identity()
            self.times = times

        def forward(self, inputs):
            for _ in range(self.times):
                inputs = self.inner(inputs)
            return inputs

    comparison = patchlab.compare_outputs(Twice(2), Twice(3), torch.ones(2))

    assert comparison.ok
    assert (comparison.rows[0].before_calls, comparison.rows[0].after_calls) == (2, 3)
    assert comparison.rows[0].status == "other shape"
    assert patchlab.compare_outputs(Twice(3), Twice(2), torch.ones(2)).rows[0].status != "same"


def test_dropout_gives_both_the_same_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)

    assert patchlab.compare_outputs(model, copy.deepcopy(model), torch.ones(8, 4)).ok

    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("inputs", [{"input_ids": tokens()}, (tokens(),), tokens()])
def test_inputs_come_as_dict_tuple_or_tensor(llama, inputs):
    assert patchlab.compare_outputs(llama, llama, inputs).ok


def test_cache_among_the_inputs_is_not_filled(llama):
    cache = transformers.DynamicCache(config=llama.config)
    named = inspect.signature(llama.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"

    assert patchlab.compare_outputs(llama, llama, {**INPUTS, name: cache}).ok

    assert cache.get_seq_length() == 0


def test_memory_grows_with_the_batch(llama):
    small = patchlab.compare_outputs(llama, llama, {"input_ids": tokens(1, 4)})
    large = patchlab.compare_outputs(llama, llama, {"input_ids": tokens(16, 32)})

    assert 0 < small.before_bytes < large.before_bytes / 16


def test_error_in_a_forward_is_told_and_leaves_no_hook():
    class Raising(nn.Module):
        def forward(self, inputs):
            raise ZeroDivisionError("no")

    model = Raising()

    with pytest.raises(TargetError, match="forward of Raising raised ZeroDivisionError: no"):
        patchlab.compare_outputs(model, model, torch.ones(1))

    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("before", "inputs"), [("model", torch.ones(1)), (chain(), 3)])
def test_what_is_no_model_and_no_input_is_refused(before, inputs):
    with pytest.raises(TargetError):
        patchlab.compare_outputs(before, chain(), inputs)


def test_it_shows_itself_as_text_frame_and_plot(llama):
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1

    comparison = patchlab.compare_outputs(llama, other, INPUTS)

    assert "first divergence: model.layers.1.mlp.up_proj" in comparison.to_text()
    told = comparison.to_text()
    assert all(row.fqn in told for row in comparison.rows)
    assert "…" not in told
    frame = comparison.to_frame()
    assert list(frame["fqn"]) == [row.fqn for row in comparison.rows]
    (axes, *_) = comparison.to_plot().axes
    assert len(axes.patches) == len(comparison.rows)
