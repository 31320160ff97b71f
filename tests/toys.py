"""Tiny models, built from real configs, and replacement classes for them."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP


def bert_config(**changes):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    return transformers.BertConfig(**(sizes | changes))


def llama_config(**changes):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**(sizes | changes))


def qwen2_moe_config(**changes):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    return transformers.Qwen2MoeConfig(**(sizes | changes))


def llava_config():
    return transformers.LlavaConfig(
        text_config=llama_config().to_dict() | {"model_type": "llama"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=3,
    )


def gpt2():
    """Build a small GPT-2, whose projections are transposed Linears."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(batch: int = 2, length: int = 5, vocab: int = 64) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))


class CountingAttention(BertSelfAttention):
    """BERT's inner attention, counting its calls."""

    calls = 0

    def forward(self, *args, **kwargs):
        type(self).calls += 1
        return super().forward(*args, **kwargs)


class SubMLP(LlamaMLP):
    pass


class OtherMLP(LlamaMLP):
    pass


class SubAttention(LlamaAttention):
    pass


class BuiltMLP(LlamaMLP):
    """With a constructor of its own, so that a swap has to call it."""

    def __init__(self, config):
        super().__init__(config)


class BuiltAttention(LlamaAttention):
    """With a constructor of its own, so that a swap has to call it."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)


class PlainMLP(nn.Module):
    """Not a subclass of any original."""

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.up_proj(hidden_states)


class RefusingMLP(nn.Module):
    """Its constructor raises what `refusal` holds."""

    refusal: BaseException = ValueError("refused")

    def __init__(self, config):
        raise self.refusal


class Wrapping(nn.Module):
    """Holds the original."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    @classmethod
    def from_original(cls, original):
        return cls(original)

    def forward(self, *args, **kwargs):
        return self.original(*args, **kwargs)


def classes_in(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def count(model: nn.Module, cls: type) -> int:
    return sum(type(module) is cls for module in model.modules())
