"""Models that do not fit: configs of full size, and checkpoints of which only the headers exist."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from patchlab._upstream import revert_conversions

SHARD = 5 << 30  # bytes, as `save_pretrained` has it in its larger shards


def llama_405b() -> Any:
    """Return the config of a Llama of 405 billion parameters."""
    return transformers.LlamaConfig(
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128_256,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def deepseek_v3() -> Any:
    """Return the config of DeepSeek-V3, 671 billion parameters."""
    return transformers.DeepseekV3Config(dtype="bfloat16", architectures=["DeepseekV3ForCausalLM"])


def qwen2_5_vl_72b() -> Any:
    """Return the config of a vision-language model of 72 billion parameters."""
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 8192,
            "intermediate_size": 29_568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 152_064,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
        },
        vision_config={
            "hidden_size": 1280,
            "intermediate_size": 3456,
            "depth": 32,
            "num_heads": 16,
            "out_hidden_size": 8192,
        },
        dtype="bfloat16",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-405b": llama_405b,
    "deepseek-v3": deepseek_v3,
    "qwen2.5-vl-72b": qwen2_5_vl_72b,
}


def write_headers(config: Any, folder: Path) -> int:
    """Write the checkpoint of a config as files that hold their headers, and holes for the data.

    Returns:
        The bytes that the data would have.
    """
    cls = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model: nn.Module = cls(config)
    state = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    state = revert_conversions(model, state)
    config.save_pretrained(folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for key, tensor in state.items():
        nbytes = 2 * tensor.numel()
        if filled and filled + nbytes > SHARD:
            shards.append({})
            filled = 0
        shards[-1][key] = tuple(tensor.shape)
        filled += nbytes
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += _write_shard(folder / name, shapes)
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        # A hole, which takes no room on a disk: nothing reads what lies behind the header.
        file.truncate(8 + len(text) + end)
    return end
