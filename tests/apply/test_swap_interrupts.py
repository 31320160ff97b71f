"""Interrupts of a swap and its undo at every line: the model is all as it was, or all replaced."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn.utils import parametrizations

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab.apply.construct import left_wrapped, open_frame_count
from tests.faults import Injected, interrupt_on, lines_run
from tests.toys import SubAttention, SubMLP, llama_config, tokens

FILES = re.compile(
    r"patchlab/apply/(swap\w*|transforms|parametrized|constructing|tensor_names)\.py$"
)


class Constants(SubMLP):
    """Has a tensor of each kind that the constructor gives."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.offset = torch.ones(2)


class Norm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    @classmethod
    def from_original(cls, original):
        made = cls(len(original.weight))
        made.weight = original.weight
        return made


# Every line of what changes the model; of what only prepares, a sample that covers each file.
STRIDE = 9
COMMIT = ("swap.py", "swap_steps.py")


def sampled(lines):
    kept = [line for line in lines if line[0].endswith(COMMIT)]
    return kept + [line for line in lines if not line[0].endswith(COMMIT)][::STRIDE]


@pytest.fixture
def worked_on():
    """A model with something of everything that a swap carries over."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(num_hidden_layers=1)).eval()
    layer = model.model.layers[0]
    layer.mlp.register_forward_hook(lambda *args: None)
    layer.mlp.up_proj.register_load_state_dict_pre_hook(lambda *args: None)
    parametrizations.weight_norm(layer.mlp.up_proj)
    add_hook_to_module(layer.mlp.down_proj, ModelHook())
    layer.self_attn.train()
    layer.mlp.requires_grad_(False)
    return model


def state_of(model):
    """Every object that hangs in the model, with its class and attributes."""
    found = {}
    for fqn, module in model.named_modules():
        attributes = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(module).items()
        }
        found[fqn] = (id(module), type(module), attributes)
    return found


def swap_parts(model):
    mapping = {"LlamaMLP": Constants, "LlamaRMSNorm": Norm, "LlamaAttention": SubAttention}
    return patchlab.swap(model, mapping)


def swap_fused(model):
    mapping = {"LlamaAttention": FusedLlamaAttention}
    return patchlab.swap(model, mapping, conversions=llama_conversions())


@pytest.mark.filterwarnings("ignore::patchlab.errors.FindingWarning")
@pytest.mark.parametrize(
    ("swap", "within"),
    [(swap_parts, FILES), (swap_fused, re.compile(r"apply/(swap_converting|transforms)\.py$"))],
    ids=["parts", "conversion"],
)
def test_interrupt_at_any_line_of_a_swap_leaves_the_model_as_it_was(worked_on, swap, within):
    expected = worked_on(tokens()).logits
    before = state_of(worked_on)
    swap(worked_on).undo()  # what is imported, and worked out, once
    with lines_run(lambda file: within.search(file) is not None) as lines:
        swapped = swap(worked_on)
    swapped.undo()
    assert len({file for file, _ in lines}) >= (2 if swap is swap_fused else 10)

    for line in sampled(lines):
        with pytest.raises(Injected), interrupt_on(line):
            swap(worked_on)
        assert state_of(worked_on) == before, line
        assert open_frame_count() == 0, line
    assert not left_wrapped()
    assert torch.equal(worked_on(tokens()).logits, expected)


@pytest.mark.filterwarnings("ignore::patchlab.errors.FindingWarning")
def test_interrupt_at_any_line_of_an_undo_leaves_all_old_or_all_new(worked_on):
    before = state_of(worked_on)
    swapped = swap_parts(worked_on)
    with lines_run(lambda file: FILES.search(file) is not None) as lines:
        swapped.undo()
    assert len(lines) > 15

    for line in lines:
        swapped = swap_parts(worked_on)
        after = state_of(worked_on)
        with pytest.raises(Injected), interrupt_on(line):
            swapped.undo()
        assert state_of(worked_on) in (before, after), line
        swapped.undo()
        assert state_of(worked_on) == before, line
