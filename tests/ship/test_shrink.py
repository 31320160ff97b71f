"""Shrunken configs: small, of the same kind, and with a model that runs."""

from __future__ import annotations

import pytest
import torch
import transformers

from patchlab.errors import TargetError
from patchlab.model.skeleton import model_class_of
from patchlab.ship.probe import config_of
from patchlab.ship.shrink import shrunken

# Dense, grouped and single key heads, low-rank projections, kinds of layers, sub-models.
TYPES = ["llama", "gpt2", "t5", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_vl"]


@pytest.mark.parametrize("model_type", TYPES)
def test_model_of_a_shrunken_config_runs_and_is_small(model_type):
    config = shrunken(config_of(model_type), 2)

    model = model_class_of(config)(config).eval()
    tokens = torch.randint(3, 60, (2, 5))
    extra = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=tokens, **extra)

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
