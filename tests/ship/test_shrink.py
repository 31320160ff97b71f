"""Shrunken configs: small, of the same kind, and with a model that runs."""

from __future__ import annotations

import pytest
import torch
import transformers

from patchlab.errors import TargetError
from patchlab.model.skeleton import model_class_of
from patchlab.ship.probe import config_of
from patchlab.ship.shrink import shrunken

# Dense, grouped and single key heads, low-rank projections, kinds of layers, sub-models, states.
TYPES = ["llama", "gpt2", "t5", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_vl"]
TYPES += ["qwen2_5_vl", "glm4v_moe", "mllama", "gptj", "bart", "gemma3n_text", "mamba2", "rwkv"]
TYPES += ["jamba", "bamba", "zamba2", "falcon_h1", "recurrent_gemma"]


@pytest.mark.parametrize("model_type", TYPES)
def test_model_of_a_shrunken_config_runs_and_is_small(model_type):
    config = shrunken(config_of(model_type), 2)

    model = model_class_of(config)(config).eval()
    tokens = torch.randint(3, 60, (2, 5))
    extra = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=False, **extra)

    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert torch.isfinite(output[0]).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_split_can_be_divided_by_the_ranks(ranks):
    for model_type in ("llama", "qwen3_moe", "deepseek_v3"):
        config = shrunken(config_of(model_type), ranks)
        sizes = [
            config.num_attention_heads,
            config.num_key_value_heads,
            config.intermediate_size,
            config.vocab_size,
            getattr(config, "num_local_experts", ranks),
            getattr(config, "moe_intermediate_size", ranks),
        ]
        assert [size % ranks for size in sizes] == [0] * len(sizes)


def test_kinds_are_kept():
    """Grouped heads stay grouped, a single one single, and no kind of layer is lost."""
    grouped = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=8)
    single = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=1)
    equal = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=32)
    mixed = transformers.Gemma3TextConfig()

    heads = [
        (small.num_attention_heads, small.num_key_value_heads)
        for small in (shrunken(config, 2) for config in (grouped, single, equal))
    ]

    assert heads == [(4, 2), (4, 1), (4, 4)]
    assert set(shrunken(mixed, 2).layer_types) == set(mixed.layer_types)


def test_layers_of_each_kind_are_kept_where_a_rule_or_a_list_of_places_tells_them():
    jamba, zamba2, griffin = (
        shrunken(config_of(kind), 2) for kind in ("jamba", "zamba2", "recurrent_gemma")
    )

    assert set(jamba.layers_block_type) == {"mamba", "attention"}
    assert set(zamba2.layers_block_type) == {"linear_attention", "hybrid"}
    assert zamba2.hybrid_layer_ids == [1]
    assert griffin.num_hidden_layers == len(griffin.block_types) == 3


def test_sizes_that_a_config_derives_follow_the_small_ones():
    """Of another name, and told apart from those that somebody has chosen."""
    rwkv = shrunken(config_of("rwkv"), 2)
    chosen = shrunken(transformers.RwkvConfig(hidden_size=64, attention_hidden_size=96), 2)

    assert rwkv.attention_hidden_size == rwkv.hidden_size == 32
    assert chosen.attention_hidden_size == 96


@pytest.mark.parametrize("head_dim", [None, 128])
def test_sections_of_a_rotary_embedding_fill_half_a_head(head_dim):
    """Also where they stand in the model's code and not in the config."""
    for kind in ("qwen2_5_vl", "glm4v_moe", "qwen3_vl"):
        whole = config_of(kind)
        if head_dim:
            whole.text_config.head_dim = head_dim
        small = shrunken(whole, 2).text_config
        rope = small.rope_parameters
        turned = int((getattr(small, "head_dim", None) or 8) * rope.get("partial_rotary_factor", 1))

        assert sum(rope["mrope_section"]) == turned // 2, kind


def test_config_that_is_given_is_not_changed():
    config = transformers.Qwen3MoeConfig()
    before = config.to_dict()

    shrunken(config, 2)

    assert config.to_dict() == before


def test_special_tokens_are_in_the_small_vocabulary():
    small = shrunken(config_of("qwen3_vl"), 2)
    ids = [small.image_token_id, small.video_token_id, small.vision_start_token_id]

    assert max(ids) < small.text_config.vocab_size or max(ids) < 152_000
    assert len(set(ids)) == len(ids)


def test_config_that_cannot_be_shrunk_is_told():
    class Refusing(transformers.LlamaConfig):
        @classmethod
        def from_dict(cls, data, **kwargs):
            raise ValueError("not so small")

    with pytest.raises(TargetError, match="cannot be shrunk: ValueError: not so small"):
        shrunken(Refusing(), 2)
