"""The complete example of the transformers guide to monkey patching, whole: Qwen2-MoE rebuilt.

Fused query, key and value, and experts as a list of modules, from a checkpoint that the test
writes: equal logits, equal generation, and saved back to the same bytes.
"""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file

import patchlab
from notebooks.replacements.fused_qkv import FusedQwen2MoeAttention, qwen2_moe_conversions
from notebooks.replacements.sequential_experts import SequentialExperts
from tests.toys import count, qwen2_moe_config, tokens

MAPPING = {"Qwen2MoeExperts": SequentialExperts, "Qwen2MoeAttention": FusedQwen2MoeAttention}
# Key and value heads beside four query heads: equal, grouped, one for all.
HEADS = pytest.mark.parametrize("groups", [4, 2, 1], ids=["MHA", "GQA", "MQA"])


@pytest.fixture
def checkpoint(tmp_path):
    def write(groups):
        torch.manual_seed(0)
        config = qwen2_moe_config(num_key_value_heads=groups)
        model = transformers.Qwen2MoeForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # The initial biases are zero, and zeros in the wrong place would not be seen.
                parameter.normal_(std=0.2)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder)
        return model, folder

    return write


def load(folder):
    with patchlab.patched(MAPPING, conversions=qwen2_moe_conversions()):
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@HEADS
def test_patched_model_gives_the_logits_of_the_unpatched_one(checkpoint, groups):
    model, folder = checkpoint(groups)

    patched = load(folder)

    assert count(patched, FusedQwen2MoeAttention) == count(patched, SequentialExperts) == 2
    assert torch.allclose(patched(tokens()).logits, model(tokens()).logits, rtol=0, atol=1e-5)


@HEADS
def test_cached_generation_is_equal_token_by_token(checkpoint, groups):
    model, folder = checkpoint(groups)
    ids = tokens(batch=2, length=6)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }

    patched = load(folder)

    assert torch.equal(patched.generate(ids, **options), model.generate(ids, **options))
    assert torch.equal(
        patched.generate(ids, **options), patched.generate(ids, use_cache=False, **options)
    )


@HEADS
def test_saved_checkpoint_is_equal_byte_by_byte(checkpoint, groups, tmp_path):
    _, folder = checkpoint(groups)

    load(folder).save_pretrained(tmp_path / "again")

    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_transformers_own_concatenate_saves_a_corrupt_checkpoint(checkpoint, tmp_path):
    """Guards the test above: with the guide's own operation it fails under grouped heads."""
    _, folder = checkpoint(2)
    conversions = qwen2_moe_conversions()
    conversions["qwen2_moe"][0].operations[:] = [transformers.Concatenate(dim=0)]

    with patchlab.patched(MAPPING, conversions=conversions):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")

    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert before[name].shape != after[name].shape


@HEADS
def test_model_made_from_a_config_runs_and_saves_the_original_layout(groups, tmp_path):
    """The guide's own example raises here: `_init_weights` looks for `gate_up_proj`."""
    config = qwen2_moe_config(num_key_value_heads=groups)
    with patchlab.patched(MAPPING, conversions=qwen2_moe_conversions()):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(tmp_path)

    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()

    assert torch.allclose(model(tokens()).logits, plain(tokens()).logits, rtol=0, atol=1e-5)


@HEADS
def test_swap_into_a_loaded_model_gives_equal_logits_and_saves_the_same(
    checkpoint, groups, tmp_path
):
    _, folder = checkpoint(groups)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = model(tokens()).logits

    with patchlab.swap(model, MAPPING, conversions=qwen2_moe_conversions()) as swapped:
        assert swapped.counts == {"Qwen2MoeExperts": 2, "Qwen2MoeAttention": 2}
        assert not swapped.report.constructed
        assert not swapped.report.dropped
        # What was only split up (`down_proj`, one expert after the other) stays a view.
        copied = ("qkv_proj.weight", "qkv_proj.bias", "experts.gate_proj", "experts.up_proj")
        names = [re.sub(r"\.\d+", "", name) for name, _ in model.named_parameters()]
        assert swapped.report.copied_bytes == sum(
            parameter.nbytes
            for name, parameter in zip(names, model.parameters(), strict=True)
            if any(part in name for part in copied)
        )
        assert torch.allclose(model(tokens()).logits, expected, rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path / "swapped")

    model.save_pretrained(tmp_path / "undone")
    before = load_file(folder / "model.safetensors")
    for name in ("swapped", "undone"):
        after = load_file(tmp_path / name / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
