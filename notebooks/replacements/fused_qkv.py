"""Attention with query, key and value in one projection, for Llama, Qwen2-MoE and BERT.

Each class takes the place of the original of the same signature, for any number of key and value
heads. The cache comes as `cache` from transformers 5.24 on and as `past_key_values` before: both are
taken, since a name that vanishes in `**kwargs` makes cached generation silently wrong.

    with patchlab.patched({"LlamaAttention": FusedLlamaAttention}, conversions=llama_conversions()):
        model = AutoModelForCausalLM.from_pretrained(folder)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import WeightConverter
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_moe import modeling_qwen2_moe

import patchlab


class FusedLlamaAttention(nn.Module):
    """Llama's attention with one projection for query, key and value."""

    modeling = modeling_llama

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.sizes = [heads * self.head_dim, groups * self.head_dim, groups * self.head_dim]
        self.num_key_value_groups = heads // groups
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        qkv_bias, out_bias = self.biases(config)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=out_bias)

    @staticmethod
    def biases(config) -> tuple[bool, bool]:
        """Whether the fused projection and the one after it have a bias."""
        return config.attention_bias, config.attention_bias

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take (batch, sequence, hidden) and return as much, with the weights or None."""
        cache = cache if cache is not None else past_key_values
        shape = hidden_states.shape[:-1]
        query, key, value = (
            part.view(*shape, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        )
        cos, sin = position_embeddings
        query, key = self.modeling.apply_rotary_pos_emb(query, key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.modeling.eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights


class FusedQwen2MoeAttention(FusedLlamaAttention):
    """Qwen2-MoE's attention with one projection for query, key and value."""

    modeling = modeling_qwen2_moe

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.layer_types[layer_idx] == "sliding_attention":
            self.sliding_window = config.sliding_window

    @staticmethod
    def biases(config) -> tuple[bool, bool]:
        """Whether the fused projection and the one after it have a bias."""
        return config.qkv_bias, False


class FusedBertSelfAttention(nn.Module):
    """BERT's inner attention with one projection for query, key and value."""

    def __init__(self, config, is_causal: bool = False, layer_idx: int | None = None):
        super().__init__()
        self.config = config
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = config.hidden_size
        self.scaling = self.attention_head_size**-0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.is_decoder = config.is_decoder
        self.is_causal = is_causal
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take (batch, sequence, hidden) and return as much, with the weights or None."""
        cache = cache if cache is not None else past_key_values
        shape = hidden_states.shape[:-1]
        query, key, value = (
            part.view(*shape, -1, self.attention_head_size).transpose(1, 2)
            for part in self.qkv(hidden_states).chunk(3, dim=-1)
        )
        if cache is not None:
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_bert.eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout.p if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return output.reshape(*shape, -1).contiguous(), weights


def llama_conversions() -> dict[str, list[WeightConverter]]:
    """The conversion of Llama's checkpoints to the fused projection."""
    return {"llama": [fuse(["q_proj", "k_proj", "v_proj"], "qkv_proj")]}


def qwen2_moe_conversions() -> dict[str, list[WeightConverter]]:
    """The conversion of Qwen2-MoE's checkpoints, for fused attention and `SequentialExperts`.

    It takes the place of transformers' own for this model type, which stacks the experts: right for
    a replacement that keeps them apart, as the checkpoint does.
    """
    return {"qwen2_moe": [fuse(["q_proj", "k_proj", "v_proj"], "qkv_proj")]}


def bert_conversions() -> dict[str, list[WeightConverter]]:
    """The conversion of BERT's checkpoints to the fused projection."""
    names = ["attention.self.query", "attention.self.key", "attention.self.value"]
    return {"bert": [fuse(names, "attention.self.qkv")]}


def fuse(sources: list[str], target: str) -> WeightConverter:
    """A converter that fuses query, key and value, and splits them again on saving."""
    return WeightConverter(
        source_patterns=sources,
        target_patterns=[target],
        operations=[patchlab.concatenate_by_config()],
    )
