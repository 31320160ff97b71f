"""Conversions in a checkpoint check against what `save_pretrained` then really writes."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import Concatenate, WeightConverter
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from notebooks.replacements.fused_qkv import (
    FusedBertSelfAttention,
    FusedQwen2MoeAttention,
    bert_conversions,
    fuse,
    llama_conversions,
    qwen2_moe_conversions,
)
from notebooks.replacements.sequential_experts import SequentialExperts
from tests.toys import bert_config, llama_config, qwen2_moe_config
from tests.verify.loads import FUSED_LLAMA, codes, loading_info


@pytest.fixture
def qwen(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "qwen"
    config = qwen2_moe_config(num_key_value_heads=2)
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_conversion_that_would_save_a_corrupt_checkpoint_is_an_error(tmp_path, groups):
    """Right exactly where a real save is right."""
    model = transformers.LlamaForCausalLM(llama_config(num_key_value_heads=groups))
    model.save_pretrained(tmp_path / "before")
    stock = {"llama": [fuse(["q_proj", "k_proj", "v_proj"], "qkv_proj")]}
    stock["llama"][0].operations[:] = [Concatenate(dim=0)]

    report = patchlab.check_checkpoint(tmp_path / "before", None, FUSED_LLAMA, conversions=stock)

    patched, _ = loading_info(tmp_path / "before", FUSED_LLAMA, stock)
    patched.save_pretrained(tmp_path / "after")
    before = load_file(tmp_path / "before" / "model.safetensors")
    after = load_file(tmp_path / "after" / "model.safetensors")
    survived = all(after[key].shape == before[key].shape for key in before)
    assert report.ok is survived is (groups == 4)
    if not survived:
        assert codes(report) == ["PL302"]
        assert "concatenate_by_config" in report.findings[0].message


def test_text_has_each_conversion_whole_on_a_line_of_its_own(qwen):
    own = get_checkpoint_conversion_mapping("qwen2_moe")
    both = {"qwen2_moe": [*own, *qwen2_moe_conversions()["qwen2_moe"]]}
    mapping = {"Qwen2MoeAttention": FusedQwen2MoeAttention}

    report = patchlab.check_checkpoint(qwen, None, mapping, conversions=both)

    lines = report.to_text().splitlines()
    assert len(report.reversals) == 3
    for reversal in report.reversals:
        assert f"● conversion {reversal.name} · reverses" in lines
    assert any("Qwen2MoeAttention → FusedQwen2MoeAttention" in line for line in lines)
    assert "…" not in report.to_text()


def test_large_tensors_are_checked_by_value_without_being_made_whole(tmp_path):
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = llama_config(**sizes, num_hidden_layers=1, intermediate_size=32)
    folder = _sparse(tmp_path, config)

    report = patchlab.check_checkpoint(config, folder, FUSED_LLAMA, conversions=llama_conversions())

    assert report.ok
    assert [r.checked for r in report.reversals] == [True]


def test_conversion_that_drops_the_experts_own_is_an_error_with_the_way_out(qwen):
    mapping = {"Qwen2MoeAttention": FusedQwen2MoeAttention}

    wrong = patchlab.check_checkpoint(qwen, None, mapping, conversions=qwen2_moe_conversions())
    both = {
        "qwen2_moe": [
            *get_checkpoint_conversion_mapping("qwen2_moe"),
            *qwen2_moe_conversions()["qwen2_moe"],
        ]
    }
    right = patchlab.check_checkpoint(qwen, None, mapping, conversions=both)

    assert codes(wrong) == ["PL305"]
    assert "get_checkpoint_conversion_mapping('qwen2_moe')" in wrong.findings[0].message
    assert right.ok
    assert not right.missing


def test_class_name_entry_that_shadows_is_an_error(llama):
    conversions = {"LlamaForCausalLM": [], **llama_conversions()}

    report = patchlab.check_checkpoint(llama, None, FUSED_LLAMA, conversions=conversions)

    assert "PL305" in codes(report)
    assert any("'LlamaForCausalLM' has conversions of its own" in str(f) for f in report.findings)


@pytest.mark.parametrize(
    ("conversions", "told"),
    [
        ({"gpt2": []}, "no such model type"),
        ({"llama": [fuse(["a", "b", "c"], "abc")]}, "matches no key"),
    ],
)
def test_conversion_that_does_nothing_is_found(llama, conversions, told):
    report = patchlab.check_checkpoint(llama, None, {}, conversions=conversions)

    assert any(f.code == "PL305" and told in f.message for f in report.findings)


def test_operation_that_raises_is_an_error_and_no_traceback(llama):
    class Raising(Concatenate):
        def convert(self, *args, **kwargs):
            raise ZeroDivisionError("no")

    conversions = {"llama": [WeightConverter(["up_proj"], ["up_proj"], [Raising()])]}

    report = patchlab.check_checkpoint(llama, None, {}, conversions=conversions)

    assert any("ZeroDivisionError: no" in finding.message for finding in report.findings)
    assert not report.ok


@pytest.mark.parametrize(
    ("model", "mapping", "conversions"),
    [
        (transformers.LlamaForCausalLM(llama_config()), FUSED_LLAMA, llama_conversions()),
        (
            transformers.Qwen2MoeForCausalLM(qwen2_moe_config()),
            {"Qwen2MoeExperts": SequentialExperts, "Qwen2MoeAttention": FusedQwen2MoeAttention},
            qwen2_moe_conversions(),
        ),
        (
            transformers.BertModel(bert_config()),
            {"BertSelfAttention": FusedBertSelfAttention},
            bert_conversions(),
        ),
    ],
    ids=["llama", "qwen2_moe", "bert"],
)
def test_the_library_of_replacements_loads_and_saves(tmp_path, model, mapping, conversions):
    model.save_pretrained(tmp_path)

    report = patchlab.check_checkpoint(tmp_path, None, mapping, conversions=conversions)

    assert report.ok
    assert not report.missing
    assert not report.unexpected


def test_name_that_another_module_has_is_an_error_since_a_save_would_take_that_too(llama):
    """Found on MiniMax, whose linear attention has a `qkv_proj` of its own."""

    class Taken(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.qkv_proj = nn.Linear(2, 2)

    mapping = FUSED_LLAMA | {"LlamaMLP": Taken}

    report = patchlab.check_checkpoint(llama, None, mapping, conversions=llama_conversions())

    assert "PL302" in codes(report)
    assert "it would also take model.layers.0.mlp.qkv_proj" in report.to_text(width=200)


def _sparse(tmp_path, config):
    """A checkpoint whose files have headers and, where the data would be, a hole."""
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    header, at = {}, 0
    for name, tensor in state.items():
        end = at + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path
