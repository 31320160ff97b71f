"""Shrunken configs: the architecture of a config at a size that a test machine runs in a second.

Every part keeps its kind (grouped key and value heads, a projection narrower than its heads, the
kinds of layers, shared experts, sub-models), and every size that parallelism splits can be divided
by the number of ranks. Sizes are known by the names that the configs of transformers 5.24.0 give
them. A size of another name that the config derives from those is derived anew; any other is kept.
"""

from __future__ import annotations

from typing import Any

from patchlab.errors import TargetError

_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
    "mamba_n_heads",
    "n_mamba_heads",
)
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim")
_WIDE = (
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "n_inner",
    "ffn_hidden_size",
    "intermediate_size_mlp",
    "mamba_d_ssm",
)
_NARROW = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
# Sizes of a head and of a low-rank projection, whatever the number of ranks.
_FIXED = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_head_dim": 8,
    "index_topk": 4,
    "patch_size": 14,
    "image_size": 28,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 64,
    "global_head_dim": 8,
    "rotary_dim": 4,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attention_window_size": 16,
    "adapter_rank": 16,
}
_MOST_LAYERS = 4


def shrunken(config: Any, ranks: int) -> Any:
    """Return a small config of the same architecture.

    Args:
        config: A config of transformers; not changed.
        ranks: What every size that is split can be divided by.

    Returns:
        A new config of the same class, for weights of float32.

    Raises:
        TargetError: The config class does not accept the small sizes.
    """
    data = _shrink(config.to_dict(), ranks, type(config))
    data.pop("transformers_version", None)
    try:
        small = type(config).from_dict(data)
    except Exception as error:
        raise TargetError(
            f"a {type(config).__name__} cannot be shrunk: {type(error).__name__}: {error}. Give "
            f"a config that is small already with --as-it-is."
        ) from error
    small.dtype = "float32"
    return small


def _shrink(data: dict[str, Any], ranks: int, kind: Any) -> dict[str, Any]:
    small = {name: value for name, value in data.items() if name not in _derived(data, kind)}
    layers = _kept_layers(data)
    depth = _first(data, _LAYERS)
    for name, value in data.items():
        if isinstance(value, list) and depth and len(value) == depth:
            small[name] = [value[place] for place in layers]
        elif depth and _are_places(name, value, depth):
            small[name] = [place for place, layer in enumerate(layers) if layer in value]
        elif name in _LAYERS and _is_size(value):
            small[name] = len(layers)
    heads = 2 * ranks
    small |= {name: heads for name in _HEADS if _is_size(data.get(name))}
    groups = data.get("num_key_value_heads")
    if _is_size(groups):
        all_heads = data.get("num_attention_heads")
        small["num_key_value_heads"] = heads if groups == all_heads else 1 if groups == 1 else ranks
    if _is_size(data.get("num_kv_shared_layers")):
        small["num_kv_shared_layers"] = min(data["num_kv_shared_layers"], len(layers) // 2)
    small |= _widths(data, heads, len(layers))
    small |= {name: 4 * ranks for name in _EXPERTS if _is_size(data.get(name))}
    small |= {name: min(2, data[name]) for name in _CHOSEN if _is_size(data.get(name))}
    for name, size in _FIXED.items():
        if _is_size(data.get(name)):
            small[name] = min(size, data[name])
    if _is_size(data.get("linear_num_key_heads")):
        small["linear_num_key_heads"] = ranks
    if _is_size(data.get("mamba_d_head")):
        small["mamba_d_head"] = 16  # So that the heads are twice as wide as the model.
    small |= _vocabulary(data, ranks)
    _rotary(small, kind)
    for name, value in data.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _shrink(value, ranks, _sub_config(kind, name, value["model_type"]))
    _joined(small)
    return small


def _derived(data: dict[str, Any], kind: Any) -> set[str]:
    """The sizes that a config class makes of others, or has as its default."""
    known = {*_HEADS, *_HIDDEN, *_WIDE, *_NARROW, *_EXPERTS, *_CHOSEN, *_LAYERS, *_FIXED}
    known |= {"num_key_value_heads", "linear_num_key_heads", "head_dim", "vocab_size"}
    known |= {"out_hidden_size", "num_kv_shared_layers", "mamba_d_head"}
    asked = {name for name, value in data.items() if _is_size(value) and name not in known}
    asked -= {name for name in asked if name.endswith(("_id", "_index"))}
    rest = {name: value for name, value in data.items() if name not in asked}
    try:
        again = kind.from_dict(rest).to_dict()
    except Exception:  # noqa: BLE001
        return set()  # It does not do without one of them, so they are kept.
    return {name for name in asked if again.get(name) == data[name]}


def _sub_config(kind: Any, name: str, model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    found = (getattr(kind, "sub_configs", None) or {}).get(name)
    if getattr(found, "model_type", ""):
        return found
    if model_type not in CONFIG_MAPPING:
        return found
    return CONFIG_MAPPING[model_type]


def _are_places(name: str, value: Any, depth: int) -> bool:
    """Tell whether a list says which layers are of a kind, such as `hybrid_layer_ids`."""
    is_list = "layer" in name and isinstance(value, list) and bool(value)
    return is_list and all(type(item) is int and 0 <= item < depth for item in value)


def _kept_layers(data: dict[str, Any]) -> list[int]:
    """Return the places of the layers to keep: the first of each kind, two at the least."""
    depth = _first(data, _LAYERS)
    if not depth:
        return []
    per_layer = [v for v in data.values() if isinstance(v, list) and len(v) == depth]
    places = [v for name, v in data.items() if _are_places(name, v, depth) and len(v) != depth]
    # A pattern that repeats is kept whole.
    pattern = [v for n, v in data.items() if n == "block_types" and isinstance(v, list)]
    kinds: dict[str, int] = {}
    for place in range(depth):
        of_it = [*(values[place] for values in per_layer), *(place in found for found in places)]
        kinds.setdefault(repr([of_it, *(place % len(found) for found in pattern)]), place)
    kept = sorted(kinds.values())[:_MOST_LAYERS]
    # A dense layer comes first in models whose experts begin later, without a list that says so.
    more = (place for place in range(depth) if place not in kept)
    while len(kept) < min(2, depth):
        kept = sorted([*kept, next(more)])
    return kept


def _widths(data: dict[str, Any], heads: int, depth: int) -> dict[str, Any]:
    small: dict[str, Any] = {}
    hidden = _first(data, _HIDDEN)
    head_dim = data.get("head_dim")
    all_heads = _first(data, _HEADS)
    if isinstance(head_dim, int) and _is_size(head_dim):
        rotary = head_dim == data.get("qk_rope_head_dim")
        narrow = bool(hidden and all_heads) and head_dim * all_heads != hidden and not rotary
        small["head_dim"] = 16 if narrow else 8
    small |= {name: 8 * heads for name in _HIDDEN if _is_size(data.get(name))}
    for names, size in ((_WIDE, 16 * heads), (_NARROW, 4 * heads)):
        for name in names:
            value = data.get(name)
            if _is_size(value):
                small[name] = size
            elif isinstance(value, list) and value and all(map(_is_size, value)):
                small[name] = [size] * (depth if len(value) > depth else len(value))
    return small


def _vocabulary(data: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return a small vocabulary, with every special token in it."""
    if not _is_size(data.get("vocab_size")):
        return {}
    size = 64 * ranks
    small: dict[str, Any] = {"vocab_size": size}
    last = size - 1
    for name, value in data.items():
        if not name.endswith(("_token_id", "_token_index")):
            continue
        if name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            small[name] = {"pad": 0, "bos": 1, "eos": 2}[name[:3]]
        elif _is_size(value) and value >= size:
            small[name], last = last, last - 1
    return small


def _rotary(small: dict[str, Any], kind: Any) -> None:
    """Make the sections of a multimodal rotary embedding add up to half a head."""
    rope = small.get("rope_parameters") or small.get("rope_scaling")
    if not isinstance(rope, dict):
        return
    # Where the config says nothing, the model has sections for the heads that it is known for.
    known = getattr(kind, "ignore_keys_at_rope_validation", None) or ()
    sections = rope.get("mrope_section") or ([0] * 3 if "mrope_section" in known else None)
    head_dim = small.get("head_dim") or 8
    if isinstance(sections, list) and sections:
        turned = int(head_dim * rope.get("partial_rotary_factor", 1))
        rest = turned // 2 - (len(sections) - 1)
        name = "rope_parameters" if "rope_parameters" in small else "rope_scaling"
        small[name] = rope | {"mrope_section": [*[1] * (len(sections) - 1), rest]}


def _joined(small: dict[str, Any]) -> None:
    """Let the parts of a model with sub-models fit: a tower gives what the text model takes."""
    text, vision = small.get("text_config"), small.get("vision_config")
    if not isinstance(vision, dict):
        return
    hidden = _first(text, _HIDDEN) if isinstance(text, dict) else _first(small, _HIDDEN)
    if hidden and _is_size(vision.get("out_hidden_size")):
        vision["out_hidden_size"] = hidden
    depth = _first(vision, _LAYERS)
    for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if depth and isinstance(vision.get(name), list):
            vision[name] = [place for place in vision[name] if place < depth] or [0]


def _first(data: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((data[name] for name in names if _is_size(data.get(name))), 0)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
