"""A patch file: a feed-forward that normalizes over what tensor parallelism splits."""

import torch
from transformers.models.llama.modeling_llama import LlamaMLP


class NormedMLP(LlamaMLP):
    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.down_proj(hidden)


MAPPING = {"LlamaMLP": NormedMLP}
