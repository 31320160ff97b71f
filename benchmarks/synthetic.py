"""A model of any size in which every second layer is of another kind, as in hybrid models."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Four projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.v_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)


class MLP(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.act_fn = nn.SiLU()


class DenseLayer(nn.Module):
    """Attention and one feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attn = Attention(width)
        self.mlp = MLP(width)


class SparseLayer(nn.Module):
    """Attention and eight feed-forwards with a router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attn = Attention(width)
        self.gate = nn.Linear(width, 8, bias=False)
        self.experts = nn.ModuleList(MLP(width) for _ in range(8))


class Model(nn.Module):
    """Stages of layers, dense and sparse in turns."""

    def __init__(self, num_stages: int, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        for stage in range(num_stages):
            width = 32 * (stage + 1)
            kinds = (DenseLayer, SparseLayer)
            self.add_module(
                f"stage{stage}", nn.ModuleList(kinds[n % 2](width) for n in range(num_layers))
            )
        self.norm = nn.LayerNorm(32)


def synthetic_model(num_modules: int, *, num_stages: int = 3) -> nn.Module:
    """Build a model with at least so many modules, on the device that is set."""
    with torch.device("meta"):
        pair = sum(len(list(kind(32).modules())) for kind in (DenseLayer, SparseLayer))
    pairs = -(-num_modules // (pair * num_stages))
    return Model(num_stages, 2 * pairs)
