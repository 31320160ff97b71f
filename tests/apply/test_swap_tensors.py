"""Tensors of a swap that a checkpoint does not hold: constants, buffers and new parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

import patchlab
from patchlab.errors import FindingWarning
from tests.toys import gpt2, tokens


class WithConstants(LlamaMLP):
    """Has one of each kind of tensor that a checkpoint does not hold."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)
        self.register_buffer("shift", torch.full((2,), 4.0))
        self.offset = torch.full((2,), 5.0)
        self.several = [torch.full((2,), 6.0)]


class WithParameter(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.bias2 = nn.Parameter(torch.full((4,), 7.0))


def test_constants_hold_what_the_constructor_gives(llama):
    with pytest.warns(FindingWarning, match=r"PL301 .*WithConstants has shift"):
        patchlab.swap(llama, {"LlamaMLP": WithConstants})

    mlp = llama.model.layers[1].mlp
    assert mlp.scale.tolist() == [3, 3]
    assert mlp.shift.tolist() == [4, 4]
    assert mlp.offset.tolist() == [5, 5]
    assert mlp.several[0].tolist() == [6, 6]


def test_new_parameter_holds_what_the_constructor_gives_and_is_found(llama):
    with pytest.warns(FindingWarning, match=r"WithParameter has bias2"):
        swapped = patchlab.swap(llama, {"LlamaMLP": WithParameter})

    assert llama.model.layers[0].mlp.bias2.tolist() == [7, 7, 7, 7]
    assert swapped.report.constructed == ("model.layers.0.mlp.bias2", "model.layers.1.mlp.bias2")
    assert swapped.ok


def test_buffer_that_is_drawn_at_random_is_drawn(llama):
    class Projecting(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("projection", torch.empty(64, 4).normal_(), persistent=False)
            self.register_buffer("range", torch.empty(9).uniform_(2, 3), persistent=False)

    patchlab.swap(llama, {"LlamaMLP": Projecting})

    mlp = llama.model.layers[0].mlp
    assert 0.5 < mlp.projection.std() < 1.5
    assert mlp.range.ge(2).all()
    assert mlp.range.le(3).all()


def test_tensors_inside_of_attributes_are_constructed(llama):
    class Tables(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.tables = {"a": torch.ones(2), "b": [torch.zeros(1), (torch.ones(1), 3)]}

    patchlab.swap(llama, {"LlamaMLP": Tables})

    tables = llama.model.layers[0].mlp.tables
    assert tables["a"].tolist() == [1, 1]
    assert tables["b"][0].tolist() == [0]
    assert tables["b"][1] == (torch.ones(1), 3)


def test_parameter_under_two_names_stays_one(llama):
    class Twice(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.again = self.up_proj.weight
            self.gain = self.scale = nn.Parameter(torch.ones(3))

    with pytest.warns(FindingWarning, match="PL301"):
        swapped = patchlab.swap(llama, {"LlamaMLP": Twice})

    mlp = llama.model.layers[0].mlp
    assert mlp.again is mlp.up_proj.weight
    assert mlp.gain is mlp.scale
    assert not any("again" in name for name in swapped.report.constructed)


def test_parameter_that_becomes_a_buffer_shares_its_storage_and_back():
    class Frozen(nn.Module):
        def __init__(self, in_features, out_features, bias):
            super().__init__()
            self.in_features, self.out_features = in_features, out_features
            self.register_buffer("weight", torch.empty(out_features, in_features))
            self.bias = nn.Parameter(torch.empty(out_features))

        def forward(self, inputs):
            return nn.functional.linear(inputs, self.weight, self.bias)

    class Thawed(nn.Linear):
        def __init__(self, in_features, out_features, bias):
            super().__init__(in_features, out_features)

    model = nn.Sequential(nn.Linear(4, 4))
    expected, place = model(torch.ones(1, 4)), model[0].weight.data_ptr()

    first = patchlab.swap(model, {"Linear": Frozen})
    second = patchlab.swap(model, {"Frozen": Thawed})

    assert torch.equal(model(torch.ones(1, 4)), expected)
    assert model[0].weight.data_ptr() == place
    assert isinstance(model[0].weight, nn.Parameter)
    assert first.ok
    assert second.ok
    assert first.report.copied_bytes == second.report.copied_bytes == 0


def test_old_names_that_a_load_understands_are_left_alone(llama):
    """`gamma` and `beta` of a live module are no old names for `weight` and `bias`."""

    class Affine(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.gamma = nn.Parameter(torch.full((2,), 2.0))
            self.weight = nn.Parameter(torch.full((2,), 3.0))

    class Other(Affine):
        def __init__(self, config):
            super().__init__(config)
            self.up_proj.register_buffer("one", torch.ones(1))

    for layer in llama.model.layers:
        layer.mlp = Affine(llama.config)
    gammas = [layer.mlp.gamma for layer in llama.model.layers]

    with pytest.warns(FindingWarning, match="one"):
        patchlab.swap(llama, {"Affine": Other})

    for layer, gamma in zip(llama.model.layers, gammas, strict=True):
        assert layer.mlp.gamma is gamma
        assert layer.mlp.weight.tolist() == [3, 3]


def test_weights_that_go_nowhere_are_an_error_finding(llama):
    class Renamed(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.upward = nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, inputs):
            return self.upward(inputs)

    with pytest.warns(FindingWarning, match="went nowhere"):
        swapped = patchlab.swap(llama, {"LlamaMLP": Renamed})

    assert not swapped.ok
    assert "model.layers.0.mlp.gate_proj.weight" in swapped.report.dropped


def test_state_of_the_random_number_generator_is_left_alone(llama):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    with pytest.warns(FindingWarning):
        patchlab.swap(llama, {"LlamaMLP": WithParameter})

    assert torch.equal(torch.rand(2), expected)


def test_buffer_that_the_new_class_computes_differently_is_its_own(llama):
    class Faster(LlamaRotaryEmbedding):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("inv_freq", 2 * self.inv_freq, persistent=False)

    expected = 2 * llama.model.rotary_emb.inv_freq

    with patchlab.swap(llama, {"LlamaRotaryEmbedding": Faster}):
        assert torch.equal(llama.model.rotary_emb.inv_freq, expected)


def test_buffer_that_only_the_original_class_computes_is_kept():
    class Sub(GPT2Attention):
        pass

    model = gpt2()
    expected = model(tokens()).logits
    buffers = dict(model.named_buffers())

    with patchlab.swap(model, {"GPT2Attention": Sub}):
        assert torch.equal(model(tokens()).logits, expected)
        assert all(b is buffers[name] for name, b in model.named_buffers())
