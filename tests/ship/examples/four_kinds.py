"""A patch file: a subclass, a fused attention, renamed projections with a plan, and experts."""

from torch import nn
from transformers import WeightConverter
from transformers.conversion_mapping import WeightRenaming, get_checkpoint_conversion_mapping
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeExperts,
    Qwen3MoeRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

import patchlab


class CountedNorm(Qwen3MoeRMSNorm):
    calls = 0

    def forward(self, hidden_states):
        type(self).calls += 1
        return super().forward(hidden_states)


class FusedAttention(Qwen3MoeAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self.sizes = [part.out_features for part in parts]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        parts = self.qkv_proj(hidden_states).split(self.sizes, dim=-1)
        query, key, value = (part.view(shape) for part in parts)
        query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output, weights = eager_attention_forward(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class RenamedMLP(nn.Module):
    def __init__(self, config, intermediate_size=None):
        super().__init__()
        wide = intermediate_size or config.intermediate_size
        self.w1 = nn.Linear(config.hidden_size, wide, bias=False)
        self.w3 = nn.Linear(config.hidden_size, wide, bias=False)
        self.w2 = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class SameExperts(Qwen3MoeExperts):
    pass


MAPPING = {
    "Qwen3MoeRMSNorm": CountedNorm,
    "Qwen3MoeAttention": FusedAttention,
    "Qwen3MoeMLP": RenamedMLP,
    "Qwen3MoeExperts": SameExperts,
}
CONVERSIONS = {
    "qwen3_moe": [
        *get_checkpoint_conversion_mapping("qwen3_moe"),
        WeightConverter(
            source_patterns=["q_proj", "k_proj", "v_proj"],
            target_patterns=["qkv_proj"],
            operations=[patchlab.concatenate_by_config()],
        ),
        WeightRenaming(source_patterns=r"mlp\.gate_proj", target_patterns="mlp.w1"),
        WeightRenaming(source_patterns=r"mlp\.up_proj", target_patterns="mlp.w3"),
        WeightRenaming(source_patterns=r"mlp\.down_proj", target_patterns="mlp.w2"),
    ]
}
# What FQNs are new, and how the fused projection's output, which is whole, comes to `o_proj`.
TP_PLAN = {
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
    "model.layers.*.mlp.w1": "colwise",
    "model.layers.*.mlp.w3": "colwise",
    "model.layers.*.mlp.w2": "rowwise",
}
