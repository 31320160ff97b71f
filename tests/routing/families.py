"""Tiny random models of every mixture-of-experts family in transformers, and inputs for them."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from patchlab.routing.sites import find_routers
from tests.routing.family_settings import CLASSES, NUM_EXPERTS, OWN, SETTINGS


def present(family):
    """Whether the installed transformers has the family."""
    return family in CONFIG_MAPPING


def tiny_config(family, **own):
    cls = CONFIG_MAPPING[family]
    known = set(getattr(cls, "attribute_map", {}) or {})
    for base in cls.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
        known |= set(inspect.signature(base.__init__).parameters)
    settings = {name: value for name, value in SETTINGS.items() if name in known}
    for alias, target in (getattr(cls, "attribute_map", {}) or {}).items():
        if alias in settings and target in settings:
            del settings[alias]
    return cls(**{**settings, **OWN.get(family, {}), **own})


def tiny_model(family, seed=0, **own):
    """Build a model whose routers have something to choose: default weights nearly tie."""
    torch.manual_seed(seed)
    config = tiny_config(family, **own)
    if family in CLASSES:
        place, name = CLASSES[family].split(":")
        model = getattr(importlib.import_module(f"transformers.models.{place}"), name)(config)
    else:
        model = _auto_class(config).from_config(config)
    _spread(model, torch.Generator().manual_seed(seed + 1))
    return model.eval()


IMAGE, IMAGE_START = 150, 152


def tiny_vision_language_model(seed=0):
    """A model that looks at images of four tokens each, and routes their tokens with the text's."""
    text = tiny_config("qwen3_vl_moe_text", vocab_size=160)
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(seed)
    config = transformers.Qwen3VLMoeConfig(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=151,
        vision_start_token_id=IMAGE_START,
        vision_end_token_id=153,
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    _spread(model, torch.Generator().manual_seed(seed + 1))
    return model.eval()


def image_tokens(model, batch_size=2, length=12):
    """Inputs with one image in each sequence, the first sequence padded on the left by one."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 100, (batch_size, length), generator=generator)
    ids[:, 1], ids[:, 2:6] = IMAGE_START, IMAGE
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(batch_size * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch_size),
    }
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def _auto_class(config):
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            return auto
    return AutoModel


def _spread(model, generator):
    def noise(tensor, scale):
        return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)

    routers = {id(p) for site in find_routers(model) for p in site.module.parameters()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                for row in buffer:
                    row.copy_(torch.randperm(NUM_EXPERTS, generator=generator)[: len(row)])
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if re.search(r"correction_bias|expert_bias$|balancing_biases", name):
                tensor.add_(noise(tensor, 0.05))
            elif id(tensor) in routers and tensor.dim() == 2 and "embed" not in name:
                tensor.copy_(noise(tensor, 0.5))
            elif _unset(tensor):
                tensor.copy_(noise(tensor, 0.05))


def _unset(tensor):
    largest = tensor.abs().max()
    return not largest < 1e3 or (tensor.dim() >= 2 and largest < 1e-6)


def tokens(model, batch_size=2, length=7, seed=3):
    """Inputs by name, as a forward of the model takes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (batch_size, length), generator=generator)
    if type(model).__name__ == "Qwen3OmniMoeTalkerModel":
        return {"inputs_embeds": model.codec_embedding(ids).detach()}
    if getattr(model.config, "is_encoder_decoder", False):
        decoder = torch.randint(3, 100, (batch_size, length - 2), generator=generator)
        return {"input_ids": ids, "decoder_input_ids": decoder}
    return {"input_ids": ids}


def with_cache(model, cache):
    """The argument by which a model of this version is handed a cache."""
    named = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in named else "past_key_values": cache}


def enable_checkpointing(model, use_reentrant=False):
    """Let a model checkpoint its layers; the method got another name in transformers 5.24."""
    old = model.gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", old)
    enable({"use_reentrant": use_reentrant})
    return model.train()


def output(model, inputs):
    """The first floating-point output of a forward: logits, or the last hidden state."""
    out = model(**inputs)
    for name in ("logits", "last_hidden_state"):
        value = getattr(out, name, None)
        if value is not None:
            return value
    return out[0]


@functools.cache
def families_in_source():
    """Package names under transformers/models whose code has a class that chooses experts."""
    root = Path(transformers.__file__).parent / "models"
    named = re.compile(r"^(\w*(?:Router|Gating|Gate|MoE|Moe|FFN|SparseMLP|SparseMo[eE]Block))\b")
    chooses = re.compile(r"\btopk\(|\bargmax\(|\bsparsemixer\(|\btid2eid\[")
    found = set()
    for file in root.glob("*/modeling_*.py"):
        for text in re.split(r"^class ", file.read_text(), flags=re.MULTILINE)[1:]:
            if named.match(text) and chooses.search(text):
                found.add(file.parent.name)
    return frozenset(found)
