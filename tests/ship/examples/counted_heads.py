"""A patch file: an attention that shapes by the number of heads in all ranks together."""

from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class CountedHeads(LlamaAttention):
    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs
    ):
        batch, length, _ = hidden_states.shape
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        query = self.q_proj(hidden_states).view(batch, length, heads, self.head_dim)
        key = self.k_proj(hidden_states).view(batch, length, groups, self.head_dim)
        value = self.v_proj(hidden_states).view(batch, length, groups, self.head_dim)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output, weights = eager_attention_forward(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0
        )
        return self.o_proj(output.reshape(batch, length, -1)), weights


MAPPING = {"LlamaAttention": CountedHeads}
