"""How long swap and undo take, against loading the model again; and a check of a huge checkpoint.

    python -m benchmarks.bench_swap [--rounds 5] [--json] [--no-check]

The models are Llamas of 135 million parameters (the sizes of SmolLM2) and of 1.2 billion, in
bfloat16, their files in the page cache. A reload maps the files and reads them at first use, so in
the baseline each weight is read once; what a reload takes before that is shown as well. The target
is for replacements that only compute otherwise. Such as have a constructor of their own cost that,
once for each module, as a reload does; and such as fuse projections copy them.

The checkpoint to check is that of DeepSeek-V3 with 64 layers (705 billion parameters): its real
names and shapes in more than four thousand files that hold headers and, where data would be, holes.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import patchlab
from benchmarks.report import Measured, compare, print_table, write_json
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab._upstream import revert_conversions
from patchlab.verify.checkpoint_files import INDEX


class OtherMLP(LlamaMLP):
    """The same layout under another class."""


class OtherAttention(LlamaAttention):
    """The same layout under another class."""


class BuiltMLP(LlamaMLP):
    """The same layout, with a constructor of its own, which a swap has to call."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)


class BuiltAttention(LlamaAttention):
    """The same layout, with a constructor of its own, which a swap has to call."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)


class OtherDeepseekAttention(DeepseekV3Attention):
    """The same layout under another class."""


def llama_sizes(case: str) -> LlamaConfig:
    """Return a config of the sizes of SmolLM2-135M or of Llama 3.2 1B."""
    small = case == "llama-135m"
    return LlamaConfig(
        hidden_size=576 if small else 2048,
        intermediate_size=1536 if small else 8192,
        num_hidden_layers=30 if small else 16,
        num_attention_heads=9 if small else 32,
        num_key_value_heads=3 if small else 8,
        vocab_size=49_152 if small else 128_256,
        tie_word_embeddings=True,
    )


def measure_swaps(case: str, folder: Path, rounds: int) -> tuple[list[Measured], dict[str, object]]:
    """Measure swap and undo against a reload of the same model."""
    made = AutoModelForCausalLM.from_config(llama_sizes(case), dtype=torch.bfloat16)
    made.save_pretrained(folder)
    del made
    model = AutoModelForCausalLM.from_pretrained(folder)
    same = {"LlamaMLP": OtherMLP, "LlamaAttention": OtherAttention}

    def reload() -> nn.Module:
        with patchlab.patched(same):
            return AutoModelForCausalLM.from_pretrained(folder)

    def reload_and_read() -> None:
        for parameter in reload().parameters():
            parameter.view(torch.int16).max()

    def swap_same() -> None:
        patchlab.swap(model, same).undo()

    def swap_built() -> None:
        mapping = {"LlamaMLP": BuiltMLP, "LlamaAttention": BuiltAttention}
        patchlab.swap(model, mapping).undo()

    def swap_fused() -> None:
        mapping = {"LlamaAttention": FusedLlamaAttention}
        patchlab.swap(model, mapping, conversions=llama_conversions()).undo()

    results = compare(
        case,
        reload_and_read,
        {
            "reload, weights not read": reload,
            "swap + undo, same layout": swap_same,
            "swap + undo, own constructors": swap_built,
            "swap + undo, fused q, k, v": swap_fused,
        },
        rounds=rounds,
        targets={"swap + undo, same layout": 0.1},
    )
    with patchlab.swap(model, same) as swapped:
        copied = swapped.report.copied_bytes
    facts = {"parameters": model.num_parameters(), "bytes copied, same layout": copied}
    print(case, facts)
    return results, facts


def write_headers(folder: Path, config: DeepseekV3Config, per_file: int = 11) -> int:
    """Write the files of a checkpoint without their data; return how many tensors it has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        state = revert_conversions(model, model.state_dict())
    names = list(state)
    weight_map = {}
    for number, start in enumerate(range(0, len(names), per_file)):
        file = f"model-{number:05d}.safetensors"
        header, at = {}, 0
        for name in names[start : start + per_file]:
            size = state[name].numel() * 2
            shape = list(state[name].shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)
    return len(names)


def measure_check(layers: int) -> dict[str, object]:
    """Check a checkpoint of this many layers once; return what it took."""
    config = DeepseekV3Config(num_hidden_layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        keys = write_headers(Path(folder), config)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        report = patchlab.check_checkpoint(
            config, folder, {"DeepseekV3Attention": OtherDeepseekAttention}
        )
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert report.ok, report.to_text()
    return {
        "layers": layers,
        "parameters": report.nbytes // 2,
        "tensors": keys,
        "files": report.num_files,
        "seconds": round(seconds, 2),
        "microseconds for a tensor": round(1e6 * seconds / keys, 1),
        "peak memory added, MB": round((after - before) / 1024, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    # First, since a process remembers only the highest peak of its memory.
    checks = [] if options.no_check else [measure_check(layers) for layers in (16, 32, 64)]
    results: list[Measured] = []
    facts: dict[str, object] = {}
    for case in ("llama-135m", "llama-1b"):
        with tempfile.TemporaryDirectory() as folder:
            measured, facts[case] = measure_swaps(case, Path(folder), options.rounds)
            results += measured
    print_table(results)
    for check in checks:
        print(check)
    if options.json:
        write_json("swap", results, {**facts, "checks": checks})


if __name__ == "__main__":
    main()
