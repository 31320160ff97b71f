"""Models worked on before a swap: parametrizations, adapters, earlier swaps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab.errors import FindingWarning, NothingReplacedWarning, SwapError
from tests.toys import (
    BuiltAttention,
    BuiltMLP,
    SubMLP,
    count,
    tokens,
)


class Doubled(nn.Linear):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__(in_features, out_features, bias)

    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Layer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)


class Scaled(LlamaMLP):
    def forward(self, inputs):
        return 3 * super().forward(inputs)


class Low(nn.Module):
    """An adapter around a Linear, as libraries for fine-tuning put it there."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, inputs):
        return self.base_layer(inputs) + inputs @ self.down.T @ self.up.T


def pruned_twice(module):
    prune.l1_unstructured(module, "weight", 0.5)
    prune.random_unstructured(module, "weight", 0.2)
    return prune.random_unstructured(module, "bias", 0.5)


COMPUTED = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
    nn.utils.spectral_norm,
    pruned_twice,
]


@pytest.mark.parametrize("compute", COMPUTED)
def test_parametrized_module_is_replaced_and_computes_its_weight_as_before(compute):
    model = nn.Sequential(compute(nn.Linear(4, 4)), nn.Linear(4, 2)).eval()
    old, names, inputs = model[0], model.state_dict().keys(), torch.ones(3, 4)
    expected = 2 * old(inputs)
    tensors = dict(old.named_parameters()) | dict(old.named_buffers())

    with patchlab.swap(model, {"Linear": Doubled}) as swapped:
        assert isinstance(model[0], Doubled)
        assert torch.allclose(model[0](inputs), expected)
        now = dict(model[0].named_parameters()) | dict(model[0].named_buffers())
        assert now.keys() == tensors.keys()
        assert all(now[name] is tensors[name] for name in now)
        assert model.state_dict().keys() == names
        assert swapped.ok
        assert not swapped.report.constructed
        with pytest.warns(NothingReplacedWarning, match="Doubled already"):
            patchlab.swap(model, {"Linear": Doubled})

    assert model[0] is old
    assert torch.allclose(old(inputs), expected / 2)


def test_parametrizations_are_the_very_same_objects():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    (norm,) = model[0].parametrizations.weight

    with patchlab.swap(model, {"Linear": Doubled}):
        assert model[0].parametrizations.weight[0] is norm
        again = copy.deepcopy(model)
        model[0](torch.ones(2, 4)).sum().backward()
        assert norm is not again[0].parametrizations.weight[0]

    assert model[0].parametrizations.weight.original0.grad is not None


def test_root_that_is_parametrized_is_replaced():
    model = parametrizations.weight_norm(nn.Linear(4, 4))
    expected = model(torch.ones(1, 4))

    with patchlab.swap(model, {"Linear": Doubled}):
        assert isinstance(model, Doubled)
        assert torch.allclose(model(torch.ones(1, 4)), 2 * expected)

    assert not isinstance(model, Doubled)
    assert torch.equal(model(torch.ones(1, 4)), expected)


@pytest.mark.parametrize(
    "compute",
    [
        parametrizations.weight_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
    ],
)
def test_parametrization_that_has_no_place_is_refused_with_the_way_out(compute):
    class Other(nn.Module):
        def __init__(self, in_features, out_features, bias):
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(out_features, in_features))

    model = nn.Sequential(compute(nn.Linear(4, 4)))
    old = model[0]

    with pytest.raises(SwapError, match=r"'weight' of 0 is computed.*remove_parametrizations"):
        patchlab.swap(model, {"Linear": Other})

    assert model[0] is old


def test_parametrized_module_can_be_made_by_a_factory():
    class Wrap(nn.Module):
        @classmethod
        def from_original(cls, original):
            wrapped = cls()
            wrapped.inner = original
            return wrapped

        def forward(self, inputs):
            return self.inner(inputs)

    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    expected = model(torch.ones(1, 4))

    patchlab.swap(model, {"Linear": Wrap})

    assert torch.equal(model(torch.ones(1, 4)), expected)


@pytest.mark.parametrize(
    "compute",
    [
        parametrizations.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
    ],
)
def test_parametrized_part_of_a_replaced_module_is_kept(llama, compute):
    part = llama.model.layers[0].mlp.up_proj
    compute(part)
    llama.eval()
    expected = llama(tokens()).logits

    with patchlab.swap(llama, {"LlamaMLP": BuiltMLP}) as swapped:
        assert torch.equal(llama(tokens()).logits, expected)
        assert llama.model.layers[0].mlp.up_proj is part
        assert [(f.code, f.severity) for f in swapped.findings] == [("PL306", "info")]

    assert torch.equal(llama(tokens()).logits, expected)


def test_adapter_in_a_replaced_module_is_kept(llama):
    attention = llama.model.layers[0].self_attn
    attention.q_proj = Low(attention.q_proj)
    expected = llama(tokens()).logits

    swapped = patchlab.swap(llama, {"LlamaAttention": BuiltAttention})

    assert torch.equal(llama(tokens()).logits, expected)
    assert swapped.ok
    assert "q_proj" in str(swapped.findings[0])
    swapped.undo()
    assert torch.equal(llama(tokens()).logits, expected)


def test_conversion_of_weights_that_an_adapter_holds_is_refused_with_the_reason(llama):
    attention = llama.model.layers[0].self_attn
    attention.q_proj = Low(attention.q_proj)

    with pytest.raises(SwapError, match=r"k_proj\.weight.*gives the shape.*merge it first"):
        patchlab.swap(
            llama, {"LlamaAttention": FusedLlamaAttention}, conversions=llama_conversions()
        )

    assert type(llama.model.layers[1].self_attn) is not FusedLlamaAttention


def test_container_that_is_swapped_keeps_what_was_swapped_inside(llama):
    patchlab.swap(llama, {"LlamaMLP": Scaled})
    expected = llama(tokens()).logits

    with patchlab.swap(llama, {"LlamaDecoderLayer": Layer}):
        assert torch.equal(llama(tokens()).logits, expected)
        assert (count(llama, Layer), count(llama, Scaled)) == (2, 2)


@pytest.mark.filterwarnings("ignore::patchlab.errors.NothingReplacedWarning")
def test_rule_for_the_original_class_leaves_the_swapped_one_in_the_container(llama):
    """As it would without the container: the key is for another class than the one there."""
    patchlab.swap(llama, {"LlamaMLP": Scaled})
    expected = llama(tokens()).logits

    patchlab.swap(llama, {"LlamaDecoderLayer": Layer, "LlamaMLP": SubMLP})

    assert torch.equal(llama(tokens()).logits, expected)


def test_container_with_a_part_of_its_own_tells_what_it_loses(llama):
    class Own(LlamaDecoderLayer):
        def __init__(self, config, layer_idx):
            super().__init__(config, layer_idx)
            self.mlp = SubMLP(config)

    patchlab.swap(llama, {"LlamaMLP": Scaled})

    with pytest.warns(FindingWarning, match=r"PL306 .*layers\.0\.mlp \(a Scaled\)"):
        patchlab.swap(llama, {"LlamaDecoderLayer": Own})

    assert count(llama, SubMLP) == 2


def test_part_with_settings_of_its_own_is_not_taken_for_the_original_one():
    class Block(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size
            self.drop = nn.Dropout(0.1)

        def forward(self, inputs):
            return self.drop(inputs)

    class More(Block):
        def __init__(self, size):
            super().__init__(size)
            self.drop = nn.Dropout(0.5)

    class Changed(nn.Dropout):
        pass

    model = nn.Sequential(Block(4))
    model[0].drop = Changed(0.1)

    with pytest.warns(FindingWarning, match=r"0\.drop \(a Changed\)"):
        patchlab.swap(model, {"Block": More})

    assert model[0].drop.p == 0.5


def test_adapter_in_a_plain_module_does_not_hide_how_it_was_constructed():
    class Block(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size
            self.linear = nn.Linear(size, size)

        def forward(self, inputs):
            return self.linear(inputs)

    class Other(Block):
        pass

    model = nn.Sequential(Block(4))
    model[0].linear = Low(model[0].linear)
    expected = model(torch.ones(1, 4))

    patchlab.swap(model, {"Block": Other})

    assert type(model[0]) is Other
    assert torch.equal(model(torch.ones(1, 4)), expected)
