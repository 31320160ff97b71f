"""Replacements that need no constructor: which do, and that both ways come to the same."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch import nn
from transformers import WeightConverter
from transformers.core_model_loading import Transpose
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import patchlab
from tests.toys import BuiltMLP, SubMLP, tokens


class Block(nn.Module):
    """Its constructor sees a class attribute, a method and the module itself."""

    kind = "plain"

    def __init__(self, size):
        super().__init__()
        self.size, self.made_as = size, self.kind
        self.linear = self.make()
        self.wide = nn.Parameter(torch.ones(3))

    def make(self):
        return nn.Linear(self.size, self.size)

    def forward(self, inputs):
        return self.linear(inputs)


def swapped(cls, original=Block):
    """Swap one block; return the old linear and the new block."""
    model = nn.Sequential(original(4))
    linear = model[0].linear
    patchlab.swap(model, {original.__name__: cls})
    return linear, model[0]


class Forward(Block):
    """Computes otherwise, by names that the original has not."""

    factor = 2

    def doubled(self, inputs):
        return self.factor * inputs

    def forward(self, inputs):
        return self.doubled(super().forward(inputs))

    def extra_repr(self):
        return "doubled"


def test_replacement_that_only_computes_otherwise_has_the_very_same_children():
    linear, new = swapped(Forward)

    assert type(new) is Forward
    assert new.linear is linear


class OwnConstructor(Block):
    def __init__(self, size):
        super().__init__(size)


class OwnKind(Block):
    kind = "other"


class OwnMake(Block):
    def make(self):
        return nn.Linear(self.size, self.size)


class OwnSetattr(Block):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)


class OwnGetattr(Block):
    def __getattr__(self, name):
        return super().__getattr__(name)


class Mixed:
    kind = "mixed"


class WithMixin(Mixed, Block):
    pass


class Unrelated(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.wide = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "cls", [OwnConstructor, OwnKind, OwnMake, OwnSetattr, OwnGetattr, WithMixin, Unrelated]
)
def test_replacement_that_the_constructor_could_know_apart_is_constructed(cls):
    linear, new = swapped(cls)

    assert type(new) is cls
    assert new.linear is not linear
    assert new.linear.weight is linear.weight
    assert getattr(new, "made_as", None) == getattr(cls, "kind", None)


def bound_method(block):
    block.linear.owner = block.forward


def itself(block):
    block.linear.back = block


def in_a_list(block):
    block.linear.owners = [block]


def in_a_partial(block):
    block.call = functools.partial(Block.forward, block)


@pytest.mark.parametrize("tie", [bound_method, itself, in_a_list, in_a_partial])
def test_module_that_its_parts_hold_is_constructed(tie):
    """A clone's parts would hold the old module."""

    class Tied(Block):
        def __init__(self, size):
            super().__init__(size)
            tie(self)

    class Other(Tied):
        pass

    linear, new = swapped(Other, Tied)

    assert new.linear is not linear


def test_children_that_are_changed_during_the_swap_are_the_old_ones_again(llama):
    old = llama.model.layers[0].mlp.up_proj

    with patchlab.swap(llama, {"LlamaMLP": SubMLP}):
        llama.model.layers[0].mlp.up_proj = nn.Identity()
        llama.model.layers[0].mlp.register_buffer("more", torch.ones(1))

    assert llama.model.layers[0].mlp.up_proj is old
    assert not hasattr(llama.model.layers[0].mlp, "more")


def test_part_that_a_rule_matches_is_replaced_too(llama):
    class Layer(LlamaDecoderLayer):
        pass

    swapped = patchlab.swap(llama, {"LlamaDecoderLayer": Layer, "LlamaMLP": SubMLP})
    assert swapped.counts == {"LlamaDecoderLayer": 2, "LlamaMLP": 2}

    assert type(llama.model.layers[1]) is Layer
    assert type(llama.model.layers[1].mlp) is SubMLP


def test_conversion_is_carried_out_also_where_no_constructor_is_needed():
    class Turned(nn.Linear):
        def forward(self, inputs):
            return inputs @ self.weight

    class Around(Block):
        def forward(self, inputs):
            return inputs @ self.linear.weight + self.linear.bias

    turn = WeightConverter(
        source_patterns=["weight"], target_patterns=["weight"], operations=[Transpose(0, 1)]
    )
    for cls, original in ((Turned, nn.Linear(4, 4, bias=False)), (Around, Block(4))):
        model, inputs = nn.Sequential(original), torch.rand(2, 4)
        expected = model(inputs)

        done = patchlab.swap(
            model, {type(original).__name__: cls}, conversions={"Sequential": [turn]}
        )

        assert torch.allclose(model(inputs), expected)
        assert done.report.converted == 1


def test_both_ways_come_to_the_same(llama):
    """Guards both: names, tensors, settings and logits are the same with and without."""
    expected, states = llama(tokens()).logits, []
    for cls in (SubMLP, BuiltMLP):
        with patchlab.swap(llama, {"LlamaMLP": cls}) as done:
            assert torch.equal(llama(tokens()).logits, expected)
            mlp = llama.model.layers[0].mlp
            settings = {
                name: value
                for name, value in vars(mlp).items()
                if isinstance(value, int | str) or name == "config"
            }
            tensors = {name: id(t) for name, t in mlp.state_dict(keep_vars=True).items()}
            states.append((settings, tensors, done.report.shared, mlp.act_fn is not None))

    assert states[0] == states[1]


def test_class_that_keeps_no_arguments_needs_none():
    model = nn.Sequential(nn.GRU(4, 4))
    expected = model(torch.ones(2, 4))[0]

    with patchlab.swap(model, {"GRU": type("Mine", (nn.GRU,), {})}):
        assert torch.equal(model(torch.ones(2, 4))[0], expected)


def test_model_is_replaced_as_the_root_without_building_it_again(llama):
    class Whole(transformers.LlamaForCausalLM):
        pass

    inner = llama.model

    with patchlab.swap(llama, {"LlamaForCausalLM": Whole}):
        assert llama.model is inner
        assert type(llama) is Whole

    class Built(LlamaMLP):
        pass

    with patchlab.swap(llama, {"LlamaForCausalLM": Whole}) as outer:
        patchlab.swap(llama, {"LlamaMLP": Built})
        assert type(llama.model.layers[0].mlp) is Built
    assert outer.undone
    assert type(llama) is transformers.LlamaForCausalLM
