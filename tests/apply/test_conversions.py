"""Weight conversions of a scope hold for loads of its context, and are gone with it.

That the conversions of transformers are unchanged is asserted after each test by the fixture
`nothing_left_behind`.
"""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import conversion_mapping
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import patchlab
from tests.toys import count, llama_config, tokens


class FusedMLP(LlamaMLP):
    """Gate and up projection in one, as a checkpoint does not have them."""

    def __init__(self, config):
        super().__init__(config)
        del self.gate_proj, self.up_proj
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class FusedQKV(LlamaAttention):
    """Query, key and value in one; needs as many key and value heads as query heads."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        size = config.num_attention_heads * self.head_dim
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * size, bias=False)

    def part(self, i):
        return lambda hidden_states: self.qkv_proj(hidden_states).chunk(3, dim=-1)[i]

    q_proj = property(lambda self: self.part(0))
    k_proj = property(lambda self: self.part(1))
    v_proj = property(lambda self: self.part(2))


def fusing_mlp():
    return WeightConverter(
        source_patterns=["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        target_patterns=["mlp.gate_up_proj.weight"],
        operations=[Concatenate(dim=0)],
    )


def fusing_qkv():
    return WeightConverter(
        source_patterns=[f"self_attn.{name}_proj.weight" for name in "qkv"],
        target_patterns=["self_attn.qkv_proj.weight"],
        operations=[Concatenate(dim=0)],
    )


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a Llama of equal heads, and the model it was saved from."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(num_key_value_heads=4)).eval()
    model.save_pretrained(tmp_path / "original")
    return tmp_path / "original", model


CASES = {
    "MLP": ({"LlamaMLP": FusedMLP}, [fusing_mlp]),
    "attention": ({"LlamaAttention": FusedQKV}, [fusing_qkv]),
    "both": ({"LlamaMLP": FusedMLP, "LlamaAttention": FusedQKV}, [fusing_mlp, fusing_qkv]),
}


@pytest.mark.parametrize("named", ["llama", "LlamaForCausalLM"])
@pytest.mark.parametrize("case", CASES)
def test_a_fused_module_loads_and_saves_back_the_original_layout(checkpoint, tmp_path, case, named):
    folder, plain = checkpoint
    mapping, makers = CASES[case]
    with patchlab.patched(mapping, conversions={named: [make() for make in makers]}):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-5)
    # Outside the scope, where nothing says any more how to reverse it but the model itself.
    model.save_pretrained(tmp_path / "again")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_conversions_a_fused_module_does_not_find_its_weights(checkpoint):
    """Guards the test above: it is the conversion that loads them; and the scope tells of it."""
    folder, _ = checkpoint
    with (
        pytest.warns(patchlab.errors.FindingWarning, match="gate_up_proj.weight of FusedMLP"),
        patchlab.patched({"LlamaMLP": FusedMLP}),
    ):
        _, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    assert any("gate_up_proj" in key for key in info["missing_keys"])


def test_a_load_after_the_scope_is_converted_no_more(checkpoint):
    folder, plain = checkpoint
    with patchlab.patched({"LlamaMLP": FusedMLP}, conversions={"llama": [fusing_mlp()]}):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert count(model, FusedMLP) == 0
    assert torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-6)


def test_a_thread_without_the_scope_loads_as_ever_meanwhile(checkpoint):
    folder, plain = checkpoint
    found = []

    def load():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        same = torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-6)
        found.append((count(model, FusedMLP), sorted(info["missing_keys"]), same))

    with patchlab.patched({"LlamaMLP": FusedMLP}, conversions={"llama": [fusing_mlp()]}):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert found == [(0, [], True)]


def test_other_threads_do_not_see_what_a_scope_says_of_a_name():
    seen = []
    with patchlab.patched({}, conversions={"llama": [fusing_mlp()]}):
        assert len(conversion_mapping.get_checkpoint_conversion_mapping("llama")) == 1
        thread = threading.Thread(
            target=lambda: seen.append(
                conversion_mapping.get_checkpoint_conversion_mapping("llama")
            )
        )
        thread.start()
        thread.join()
    assert seen == [get_checkpoint_conversion_mapping("llama")]


def test_the_innermost_scope_that_names_it_decides():
    ask = lambda name: conversion_mapping.get_checkpoint_conversion_mapping(name)  # noqa: E731
    with patchlab.patched({}, conversions={"llama": [fusing_mlp(), fusing_qkv()], "x": []}):
        with patchlab.patched({}, conversions={"llama": [fusing_mlp()]}):
            assert (len(ask("llama")), ask("x")) == (1, [])
        assert len(ask("llama")) == 2


def test_a_scope_is_not_changed_by_a_load_and_can_be_used_again(checkpoint):
    folder, plain = checkpoint
    given = [fusing_mlp()]
    scope = patchlab.patched({"LlamaMLP": FusedMLP}, conversions={"llama": given})
    given.clear()
    for _ in range(2):
        with scope:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-5)


def test_a_class_name_comes_before_a_model_type(checkpoint):
    """As in transformers: the more exact name decides."""
    folder, plain = checkpoint
    wrong = WeightRenaming(source_patterns="down_proj", target_patterns="no_such_proj")
    conversions = {"LlamaForCausalLM": [fusing_mlp()], "llama": [wrong]}
    with patchlab.patched({"LlamaMLP": FusedMLP}, conversions=conversions):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-5)


def test_what_is_registered_inside_is_gone_and_what_was_there_is_back():
    register = conversion_mapping.register_checkpoint_conversion_mapping
    ask = conversion_mapping.get_checkpoint_conversion_mapping
    by_user = set(conversion_mapping.USER_REGISTERED_MAPPINGS)
    before = ask("qwen2_moe")
    assert before
    with patchlab.patched({}):
        register("qwen2_moe", [fusing_mlp()], overwrite=True)
        register("of_nobody", [fusing_mlp()])
        assert len(ask("of_nobody")) == 1
    assert ask("of_nobody") is None
    assert len(ask("qwen2_moe")) == len(before)
    assert by_user == conversion_mapping.USER_REGISTERED_MAPPINGS


def test_registered_conversions_are_found_beside_those_of_a_scope():
    ask = lambda name: conversion_mapping.get_checkpoint_conversion_mapping(name)  # noqa: E731
    with patchlab.patched({}, conversions={"llama": [fusing_mlp()]}):
        conversion_mapping.register_checkpoint_conversion_mapping("mine", [fusing_qkv()])
        assert len(ask("mine")) == 1
        assert len(ask("llama")) == 1


@pytest.mark.parametrize(
    ("conversions", "error", "reason"),
    [
        ([], TypeError, "must be a dict"),
        ("llama", TypeError, "must be a dict"),
        ({3: []}, TypeError, "named by a model type"),
        ({"": []}, ValueError, "empty name"),
        ({" ": []}, ValueError, "empty name"),
        ({"llama": None}, TypeError, "must be a list"),
        ({"llama": fusing_mlp()}, TypeError, "must be a list"),
        ({"llama": ["gate_proj"]}, TypeError, "no WeightConverter"),
        ({"llama": [fusing_mlp(), WeightConverter]}, TypeError, "no WeightConverter"),
    ],
)
def test_what_is_no_conversion_is_refused_at_the_door(conversions, error, reason):
    with pytest.raises(error, match=reason):
        patchlab.patched({}, conversions=conversions)
