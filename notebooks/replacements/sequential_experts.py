"""Experts as a list of ordinary modules, for Qwen2-MoE: what quantization libraries can reach.

The original keeps all experts in two three-dimensional parameters. Here each expert is a module of
`Linear` layers with the names of the checkpoint, so no conversion is needed to load it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN


class ExpertMLP(nn.Module):
    """One expert."""

    def __init__(self, config):
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Take and return (num_tokens, hidden)."""
        gated = self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        return self.down_proj(gated)


class SequentialExperts(nn.ModuleList):
    """All experts of a layer, called one after the other."""

    def __init__(self, config):
        super().__init__(ExpertMLP(config) for _ in range(config.num_experts))
        self.num_experts = config.num_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts.

        Args:
            hidden_states: (num_tokens, hidden).
            top_k_index: (num_tokens, top_k), the experts of each token.
            top_k_weights: (num_tokens, top_k), what their outputs are multiplied by.
        """
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, slot = torch.where(top_k_index == number)
            if token.numel():
                output = expert(hidden_states[token]) * top_k_weights[token, slot, None]
                total.index_add_(0, token, output.to(total.dtype))
        return total
