"""Every architecture of the installed transformers, and a default config that builds it.

The default configs of some architectures lack what their models need. What they need is set here,
to values of the usual size; the models are built on the meta device, so no size costs anything.
Checked on transformers 5.24.0.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchlab.model.catalog import Catalog

INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "indexer_block_size": 64,
    "head_dim": 128,
}
SPARSE = {"mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_hidden_layers": 12}
ROPE = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("full_attention", "sliding_attention")
    }
}
EXPERTS = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 256}
HEAD = {"head_dim": 128}

# Config class → what its constructor is given.
GIVEN: dict[str, dict[str, Any]] = {
    "AutoformerConfig": {"prediction_length": 24},
    "InformerConfig": {"prediction_length": 24},
    "TimeSeriesTransformerConfig": {"prediction_length": 24},
    "AyaVisionConfig": {
        "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}
    },
    "ChameleonConfig": {"vocabulary_map": {"<image>": 8711, "IMGIMGA": 5}},
    "Emu3Config": {"vocabulary_map": {"<image>": 8711, "<|visual token 000001|>": 5}},
    "HunYuanDenseV1Config": HEAD,
    "HunYuanMoEV1Config": HEAD,
    "HunYuanVLTextConfig": HEAD,
    "HunYuanVLConfig": {"text_config": HEAD},
    "MinistralConfig": HEAD,
    "NemotronConfig": {"head_dim": 128, "num_key_value_heads": 8},
    "EsmConfig": {"vocab_size": 33},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 16, "num_hidden_layers": 32},
    "Granite4VisionConfig": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-19, 9], [-13, 6]],
    },
    "DeepseekOcr2TextConfig": SPARSE,
    "DeepseekOcr2Config": {"text_config": SPARSE},
    "Dots1Config": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
    },
    "CohereCompassTextConfig": ROPE,
    "CohereCompassConfig": {"text_config": ROPE},
    "Qwen4ExpTextConfig": INDEXER,
    "Qwen4ExpConfig": {"text_config": INDEXER},
    "DiffusionGemmaTextConfig": EXPERTS | {"num_experts_per_tok": 2},
    "DiffusionGemmaConfig": {"text_config": EXPERTS},
    "ReformerConfig": {"is_decoder": False},
    "Gemma4AssistantConfig": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    },
}

# Config class → attribute → what it is set to afterwards.
SET: dict[str, dict[str, Any]] = {
    "DbrxConfig": {"attn_config.rope_theta": 1e4},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "T5Gemma2EncoderConfig": {"text_config.dropout_rate": 0.0},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 256},
    "Qwen3OmniMoeTalkerConfig": {
        "text_config.shared_expert_intermediate_size": 256,
        "spatial_merge_size": 2,
    },
    "Qwen3OmniMoeConfig": {
        "talker_config.text_config.shared_expert_intermediate_size": 256,
        "talker_config.spatial_merge_size": 2,
    },
    "MoonshineStreamingConfig": {"num_key_value_heads": 8},
    "TimmBackboneConfig": {"backbone": "resnet50"},
}

# Config classes whose base model no default config builds, with why.
UNBUILDABLE = {
    "MusicgenMelodyConfig": "its base model takes the config of its decoder",
    "PPOCRV5ServerDetConfig": "needs the config of a backbone that only its checkpoints have",
    "PPOCRV6MediumDetConfig": "needs the config of a backbone that only its checkpoints have",
    "VitMatteConfig": "its default backbone's stage names are a tuple where a list is expected",
}

# A hundred of those that build quickly, drawn once with `random.Random(0).sample`.
SAMPLE = tuple(Path(__file__).with_name("data").joinpath("architectures.txt").read_text().split())


class NotInstalledError(Exception):
    """An architecture needs a package that is not there."""


def config_of(catalog: Catalog, name: str) -> Any:
    """Make a config of this class that its base model can be built from."""
    config = _config_class(catalog, name)(**GIVEN.get(name, {}))
    for path, value in SET.get(name, {}).items():
        holder = config
        *parents, attribute = path.split(".")
        for parent in parents:
            holder = getattr(holder, parent)
        setattr(holder, attribute, value)
    return config


def base_model_of(catalog: Catalog, name: str) -> type[nn.Module]:
    """Return the base model's class of a config class."""
    number = catalog.configs[name].models[0]
    python_module = importlib.import_module(catalog.python_module(number))
    return getattr(python_module, catalog.names[number])


def build(catalog: Catalog, name: str) -> nn.Module:
    """Build the base model of a config class on the meta device.

    Raises:
        NotInstalledError: It needs a package that is not installed.
    """
    try:
        # What a constructor warns of (torch: empty tensors need no initialization) is no concern.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return base_model_of(catalog, name)._from_config(config_of(catalog, name))
    except ImportError as error:
        raise NotInstalledError(str(error).strip().splitlines()[0]) from error


def _config_class(catalog: Catalog, name: str) -> type:
    package = importlib.import_module(f"transformers.models.{catalog.configs[name].folder}")
    if hasattr(package, name):
        return getattr(package, name)
    # A config that its package does not export: the modeling file imports it.
    number = catalog.configs[name].models[0]
    return getattr(importlib.import_module(catalog.python_module(number)), name)
