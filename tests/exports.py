"""Fresh processes for exported patch files: a session that writes one, and jobs that use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}

# A script that is run as `__main__`: what it defines there can be imported by nobody.
SESSION = '''
"""A session."""

import math
import sys

import torch
import torch.nn.functional as F
from scaling import Scaled
from torch import nn
from torch.nn import Linear as Dense
from transformers.conversion_mapping import WeightConverter, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import patchlab

SCALE = {"one": 1.0, "none": None}
CALLS = 0


def rate(value, *, scale=SCALE):
    def times(number):
        return number * scale["one"]

    return times(value) + math.log(1.0)


def counted(cls):
    cls.counted = True
    return cls


class Gated(nn.Module):
    """The MLP of both models, with names that differ from theirs."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = Dense(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Dense(config.hidden_size, config.intermediate_size, bias=False)
        self.out_proj = Dense(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        global CALLS
        CALLS += 1
        return rate(self.out_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


@counted
class MyMLP(Gated):
    pass


class Part:
    """One of the projections in a fused one."""

    def __init__(self, whole, start, stop):
        self.weight = whole.weight[start:stop]

    def __call__(self, x):
        return F.linear(x, self.weight)


PARTS = ("q_proj", "k_proj", "v_proj")


class FusedAttention(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        parts = [self._modules.pop(name) for name in PARTS]
        self.sizes = [part.out_features for part in parts]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)

    def __getattr__(self, name):
        if name in PARTS and "qkv_proj" in self.__dict__.get("_modules", ()):
            start = sum(self.sizes[: PARTS.index(name)])
            return Part(self.qkv_proj, start, start + self.sizes[PARTS.index(name)])
        return super().__getattr__(name)


CONVERSIONS_OF_MINE = {
    "llama": [
        WeightConverter(
            source_patterns=list(PARTS),
            target_patterns=["qkv_proj"],
            operations=[patchlab.concatenate_by_config()],
        ),
        WeightRenaming("mlp.down_proj", "mlp.out_proj"),
    ],
    "qwen2": [WeightRenaming("mlp.down_proj", "mlp.out_proj")],
}
MINE = {"LlamaMLP": MyMLP, "^LlamaAttention$": FusedAttention, "Qwen2MLP": MyMLP, "OPTNorm": Scaled}

if __name__ == "__main__":
    written = patchlab.export_patches(sys.argv[1], MINE, conversions=CONVERSIONS_OF_MINE)
    again = patchlab.export_patches(sys.argv[1], MINE, conversions=CONVERSIONS_OF_MINE)
    print(__import__("json").dumps([list(written.names), written.text == again.text]))
'''

SCALING = """
from torch import nn


class Scaled(nn.LayerNorm):
    pass
"""

# The cells of a notebook; the last exports to `path`.
CELLS = [
    "%load_ext patchlab\nimport torch\nfrom torch import nn\n"
    "from transformers.models.llama.modeling_llama import LlamaMLP",
    "FACTOR = 2",
    "def double(x):\n    return FACTOR * x",
    "class Base(LlamaMLP):\n    version = 1",
    "class MyMLP(Base):\n    def forward(self, x):\n        return double(super().forward(x))",
    # Both again, in other cells, and a cell whose magic runs it.
    "class Base(LlamaMLP):\n    version = 2",
    "%%capture\nclass MyMLP(Base):\n    def forward(self, x):\n"
    "        return double(super().forward(x)) / FACTOR",
    "%patches register LlamaMLP=MyMLP\n%patches export {path}",
]

# A training job that has the file and a checkpoint, with patchlab or without.
JOB = """
import json
import sys

if sys.argv[1] == "without":
    sys.modules["patchlab"] = None  # As where it is not installed.
import patches

import torch
from transformers import AutoConfig, AutoModelForCausalLM

first, second = patches.register(), patches.register()
said = {"same": first is second is patches.MAPPING, "keys": list(first)}
ids = torch.arange(12).reshape(3, 4)
for name in sys.argv[2:]:
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    loaded, info = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True)
    loaded.save_pretrained(name + "-saved")
    said[name] = {
        "made": sorted({type(m).__name__ for m in made.modules()}),
        "loaded": sorted({type(m).__name__ for m in loaded.modules()}),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "logits": loaded(ids).logits.sum(-1).tolist(),
    }
said["loaded patchlab"] = sys.modules.get("patchlab") is not None
said["calls"] = patches.CALLS
# The file of a kernel, in the same process: its classes take the place of those of the first.
import from_cells
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=16, intermediate_size=8, num_hidden_layers=1, vocab_size=12, num_attention_heads=2
)
from_cells.register()
model = LlamaForCausalLM._from_config(config)
mlp = model.model.layers[0].mlp
hidden = torch.randn(1, 2, 16)
said["cells"] = [type(mlp).__name__, type(mlp).__module__, mlp.version]
said["computes"] = bool(model(ids).logits.shape == (3, 4, 12)) and torch.allclose(
    mlp(hidden), mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
)
if sys.argv[1] == "with":
    # The session once more, in a process with another history and other hashes.
    import runpy

    sys.argv[1:] = ["other.py"]
    runpy.run_path("session.py", run_name="__main__")
print(json.dumps(said))
"""


def run_python(*arguments: str, cwd: Path, expect: int = 0) -> str:
    """Run a script in a fresh interpreter that finds patchlab, and return what it printed."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == expect, ran.stderr[-4000:]
    return ran.stdout if expect == 0 else ran.stderr


def last_json(text: str):
    """Return the value of the last line that a process printed."""
    return json.loads(text.strip().splitlines()[-1])
