"""What was set on a module, added to it or taken off since its constructor ran is so in a swap."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from tests.fused_families import SMALL
from tests.toys import BuiltMLP, SubMLP, tokens


def add_buffer(mlp):
    mlp.register_buffer("added", torch.ones(2), persistent=False)


def add_parameter(mlp):
    mlp.up_proj.bias = nn.Parameter(torch.ones(64))


def add_child(mlp):
    mlp.adapter = nn.Linear(2, 2)


def add_attribute(mlp):
    mlp.gate_proj.note = ["kept"]


def set_setting(mlp):
    mlp.act_fn.inplace = mlp.hidden_size = 7


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (add_buffer, lambda mlp: mlp.added),
        (add_parameter, lambda mlp: mlp.up_proj.bias),
        (add_child, lambda mlp: mlp.adapter),
        (add_attribute, lambda mlp: mlp.gate_proj.note),
        (set_setting, lambda mlp: mlp.hidden_size),
    ],
)
@pytest.mark.parametrize("replacement", [SubMLP, BuiltMLP])
def test_what_was_added_to_a_module_is_in_its_place_too(llama, change, read, replacement):
    for layer in llama.model.layers:
        change(layer.mlp)
    expected, found = llama(tokens()).logits, read(llama.model.layers[0].mlp)
    names = llama.state_dict().keys()

    with patchlab.swap(llama, {"LlamaMLP": replacement}) as swapped:
        assert read(llama.model.layers[0].mlp) is found
        assert torch.equal(llama(tokens()).logits, expected)
        assert llama.state_dict().keys() == names
        assert not swapped.findings


class Norm(nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True):
        super().__init__(normalized_shape, eps, elementwise_affine, bias)


def test_what_was_taken_off_a_module_is_not_constructed_again():
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    model[0].bias = None

    with patchlab.swap(model, {"LayerNorm": Norm}) as swapped:
        assert model[0].bias is None
        assert model[1].bias is not None
        assert not swapped.findings


def test_setting_that_the_replacement_chooses_itself_is_its_own(llama):
    class Wide(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.hidden_size = 3
            self.note = "mine"

    mlp = llama.model.layers[0].mlp
    mlp.hidden_size, mlp.note = 7, "set"

    patchlab.swap(llama, {"LlamaMLP": Wide})

    assert llama.model.layers[0].mlp.hidden_size == 3
    assert llama.model.layers[0].mlp.note == "mine"


def test_list_that_was_filled_after_it_was_made_is_replaced_with_its_entries(llama):
    class Layers(nn.ModuleList):
        def __init__(self, modules=None):
            super().__init__(modules)

    expected, layers = llama(tokens()).logits, list(llama.model.layers)

    with patchlab.swap(llama, {"ModuleList": Layers}):
        assert type(llama.model.layers) is Layers
        assert all(a is b for a, b in zip(llama.model.layers, layers, strict=True))
        assert torch.equal(llama(tokens()).logits, expected)


def test_part_that_its_model_works_on_after_construction_is_replaced():
    """MPT takes the bias off its norms."""
    known = transformers.MptConfig()
    config = transformers.MptConfig(**{k: v for k, v in SMALL.items() if hasattr(known, k)})
    model = transformers.MptForCausalLM(config).eval()
    expected, names = model(tokens()).logits, model.state_dict().keys()

    with patchlab.swap(model, {"LayerNorm": Norm}) as swapped:
        assert torch.equal(model(tokens()).logits, expected)
        assert model.state_dict().keys() == names
        assert not swapped.findings


class Normed(nn.Module):
    """Has weight norm from its own constructor, as Wav2Vec2 does."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.linear = parametrizations.weight_norm(nn.Linear(size, size))

    def forward(self, inputs):
        return self.linear(inputs)


class OtherNormed(Normed):
    def __init__(self, size):
        super().__init__(size)


def test_parametrization_that_both_constructors_make_is_no_change():
    model = nn.Sequential(Normed(4))
    expected, tensors = model(torch.ones(1, 4)), model.state_dict(keep_vars=True)

    with patchlab.swap(model, {"Normed": OtherNormed}) as swapped:
        assert torch.equal(model(torch.ones(1, 4)), expected)
        now = model.state_dict(keep_vars=True)
        assert all(now[name] is tensors[name] for name in tensors)
        assert not swapped.findings


def test_list_in_a_plain_model_is_replaced_with_its_entries():
    class Row(nn.Sequential):
        def __init__(self, *args):
            super().__init__(*args)

    model = nn.ModuleDict({"row": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
    entries = list(model["row"])

    with patchlab.swap(model, {"Sequential": Row}):
        assert type(model["row"]) is Row
        assert list(model["row"]) == entries
