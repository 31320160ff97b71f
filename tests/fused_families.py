"""Tiny causal language models with q, k and v projections, and their fused attention."""

from __future__ import annotations

import functools
import warnings

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import patchlab

PARTS = ("q_proj", "k_proj", "v_proj")
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
}


class Part:
    """What a fused attention shows in place of one of its projections."""

    def __init__(self, whole: nn.Linear, start: int, stop: int) -> None:
        self.weight = whole.weight[start:stop]
        self.bias = None if whole.bias is None else whole.bias[start:stop]
        for whole_tensor, part in ((whole.weight, self.weight), (whole.bias, self.bias)):
            if getattr(whole_tensor, "_is_hf_initialized", False):
                # Else the model's `_init_weights` writes over what was loaded.
                part._is_hf_initialized = True

    def __call__(self, hidden_states):
        return functional.linear(hidden_states, self.weight, self.bias)


@functools.cache
def fused(original: type[nn.Module]) -> type[nn.Module]:
    """The original with its three projections kept as one."""

    def __init__(self, *args, **kwargs):
        original.__init__(self, *args, **kwargs)
        parts = [self._modules.pop(name) for name in PARTS]
        self.sizes = [part.out_features for part in parts]
        bias = parts[0].bias is not None
        self.qkv_proj = nn.Linear(parts[0].in_features, sum(self.sizes), bias=bias)

    def __getattr__(self, name):
        if name in PARTS and "qkv_proj" in self.__dict__.get("_modules", ()):
            place = PARTS.index(name)
            start = sum(self.sizes[:place])
            return Part(self.qkv_proj, start, start + self.sizes[place])
        return original.__getattr__(self, name)

    name = f"Fused{original.__name__}"
    members = {"__init__": __init__, "__getattr__": __getattr__, "__module__": __name__}
    return type(name, (original,), members)


def attentions(model: nn.Module) -> dict[str, tuple[type[nn.Module], tuple[int, ...]]]:
    """Name → class and rows of q, k and v, of the attention classes that can be fused alike."""
    found: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {}
    for module in model.modules():
        parts = [module._modules.get(name) for name in PARTS]
        if not all(type(part) is nn.Linear for part in parts):
            continue
        if len({(p.in_features, p.bias is None) for p in parts}) > 1:
            continue
        sizes = tuple(part.out_features for part in parts)
        known = found.setdefault(type(module).__name__, (type(module), sizes))
        if known[1] != sizes:
            return {}
    return found


def conversions(model: nn.Module, sizes: tuple[int, ...]) -> dict[str, list]:
    """The model's own conversions with the fusion added, under the name that decides."""
    name = type(model).__name__
    own = get_checkpoint_conversion_mapping(name)
    if own is None:
        name = model.config.model_type
        own = get_checkpoint_conversion_mapping(name)
    try:
        by_config = tuple(patchlab.concatenate_by_config().sizes(model.config))
    except (AttributeError, TypeError):
        by_config = ()
    operation = (
        patchlab.concatenate_by_config()
        if by_config == sizes
        else patchlab.concatenate_by_config(lambda config: sizes)
    )
    fusion = transformers.WeightConverter(
        source_patterns=list(PARTS), target_patterns=["qkv_proj"], operations=[operation]
    )
    return {name: [*(own or []), fusion]}


@functools.cache
def model_types() -> tuple[str, ...]:
    """Every model type that builds small and has an attention that can be fused."""
    return tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if build(name) is not None)


def build(model_type: str) -> nn.Module | None:
    """Build a tiny model; None where the small sizes do not fit or nothing can be fused."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            config_class = transformers.CONFIG_MAPPING[model_type]
            known = config_class()
            sizes = {name: value for name, value in SMALL.items() if hasattr(known, name)}
            config = config_class(**sizes)
            with torch.device("meta"):
                probe = transformers.AutoModelForCausalLM.from_config(config)
            found = attentions(probe)
            if sum(p.numel() for p in probe.parameters()) > 3_000_000 or _unfit(probe, found):
                return None
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                model(input_ids=torch.ones(1, 3, dtype=torch.long))
    except Exception:  # noqa: BLE001  (which sizes fit a family is found out by trying)
        return None
    return model


def _unfit(model: nn.Module, found: dict[str, tuple[type[nn.Module], tuple[int, ...]]]) -> bool:
    """Tell whether one conversion cannot fuse a model: sizes differ, names are taken or made."""
    own = [
        target
        for name in (type(model).__name__, model.config.model_type)
        for transform in get_checkpoint_conversion_mapping(name) or ()
        for target in transform.target_patterns
    ]
    return (
        len({sizes for _, sizes in found.values()}) != 1
        or any("q_proj" in target for target in own)
        or any("qkv_proj" in name for name, _ in model.named_modules())
    )
