"""Weights that accelerate keeps elsewhere: their hooks follow, or the swap is refused."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab.errors import SwapError
from tests.toys import BuiltAttention, BuiltMLP, SubAttention, SubMLP, tokens


class Layer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)


class Whole(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)


class Grown(LlamaMLP):
    """Its projection has a bias, which the offloaded weights lack."""

    def __init__(self, config):
        super().__init__(config)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)


@pytest.fixture(params=["cpu", "disk", "mixed"])
def offloaded(request, llama, tmp_path):
    if request.param == "cpu":
        accelerate.cpu_offload(llama, execution_device="cpu")
    elif request.param == "disk":
        accelerate.disk_offload(llama, tmp_path, execution_device="cpu")
    else:
        places = dict.fromkeys(
            ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"],
            "cpu",
        )
        accelerate.dispatch_model(
            llama,
            places | {"model.layers.1": "disk"},
            main_device="cpu",
            offload_dir=tmp_path,
            force_hooks=True,
        )
    return llama


@pytest.mark.parametrize(
    "mapping",
    [
        {"LlamaMLP": SubMLP, "LlamaAttention": SubAttention},
        {"LlamaMLP": BuiltMLP, "LlamaAttention": BuiltAttention},
        {"LlamaDecoderLayer": Layer},
        {"LlamaForCausalLM": type("Whole", (transformers.LlamaForCausalLM,), {})},
        {"LlamaForCausalLM": Whole},
    ],
    ids=["cloned parts", "parts", "layers", "cloned root", "root"],
)
def test_offloaded_model_gives_the_same_logits_during_and_after_a_swap(offloaded, mapping):
    expected = offloaded(tokens()).logits
    modules = dict(offloaded.named_modules())
    hooks = {name: vars(module).get("_hf_hook") for name, module in modules.items()}

    with patchlab.swap(offloaded, mapping) as swapped:
        assert all(swapped.counts.values())
        assert not swapped.findings
        for _ in range(2):
            assert torch.equal(offloaded(tokens()).logits, expected)
        now = offloaded.named_modules()
        assert {name: vars(module).get("_hf_hook") for name, module in now} == hooks

    again = dict(offloaded.named_modules())
    assert all(again[name] is modules[name] for name in modules)
    assert torch.equal(offloaded(tokens()).logits, expected)


@pytest.mark.parametrize(
    ("mapping", "conversions", "told"),
    [
        ({"LlamaMLP": Grown}, None, r"up_proj\.bias would be new.*before the model is offloaded"),
        (
            {"LlamaAttention": FusedLlamaAttention},
            llama_conversions(),
            r"would have to be converted.*before the model is offloaded",
        ),
    ],
    ids=["new parameter", "conversion"],
)
def test_what_cannot_be_done_with_offloaded_weights_is_refused(
    offloaded, mapping, conversions, told
):
    expected, modules = offloaded(tokens()).logits, list(offloaded.modules())

    with pytest.raises(SwapError, match=told):
        patchlab.swap(offloaded, mapping, conversions=conversions)

    assert list(map(id, offloaded.modules())) == list(map(id, modules))
    assert torch.equal(offloaded(tokens()).logits, expected)


def test_lazy_module_is_refused_until_it_has_run():
    class Block(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size
            self.linear = nn.LazyLinear(size)

        def forward(self, inputs):
            return self.linear(inputs)

    class More(Block):
        pass

    model = nn.Sequential(Block(4))

    with pytest.raises(SwapError, match=r"0\.linear\.weight is not initialized.*Run the model"):
        patchlab.swap(model, {"Block": More})
