"""Checkpoint checks against what `from_pretrained` and `save_pretrained` then really do."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import patchlab
from notebooks.replacements.fused_qkv import (
    llama_conversions,
)
from patchlab.errors import CheckpointError, FindingsError
from tests.fused_families import fused
from tests.toys import SubMLP, llama_config
from tests.verify.loads import FUSED_LLAMA, codes, loading_info

# Keys


def test_unpatched_checkpoint_has_a_place_for_every_key(llama):
    report = patchlab.check_checkpoint(llama, mapping={})

    assert report.ok
    assert not report.findings
    assert "every key has its place" in report.verdict


def test_fused_attention_with_its_conversion_is_right(llama):
    report = patchlab.check_checkpoint(llama, mapping=FUSED_LLAMA, conversions=llama_conversions())

    assert report.ok
    (weights,) = report.classes
    assert len(weights.converted) == 2
    assert len(weights.loaded) == 2
    assert all(reversal.ok for reversal in report.reversals)


def test_missing_conversion_is_an_error_that_names_both_sides(llama):
    report = patchlab.check_checkpoint(llama, mapping=FUSED_LLAMA)

    assert not report.ok
    (weights,) = report.classes
    assert "model.layers.0.self_attn.qkv_proj.weight" in weights.random
    assert "model.layers.0.self_attn.q_proj.weight" in weights.dropped
    with pytest.raises(FindingsError, match="a conversion is missing"):
        report.check()


@pytest.mark.parametrize(
    ("mapping", "conversions"),
    [
        ({}, None),
        (FUSED_LLAMA, None),
        (FUSED_LLAMA, llama_conversions()),
        ({"LlamaMLP": SubMLP}, None),
    ],
)
def test_missing_and_unexpected_keys_are_those_of_a_real_load(llama, mapping, conversions):
    report = patchlab.check_checkpoint(llama, mapping=mapping, conversions=conversions)

    _, info = loading_info(llama, mapping, conversions)

    assert set(report.missing) == set(info["missing_keys"])
    assert set(report.unexpected) == set(info["unexpected_keys"])


@pytest.mark.parametrize("head", ["LlamaModel", "LlamaForSequenceClassification"])
def test_base_model_and_other_heads_are_understood(llama, head):
    """The prefix of the base model is added and taken off, as a load does."""
    cls = getattr(transformers, head)
    config = llama_config(pad_token_id=0)
    with torch.device("meta"):
        target = cls(config)

    report = patchlab.check_checkpoint(target, llama, {})

    _, info = cls.from_pretrained(llama, config=config, output_loading_info=True)
    assert set(report.missing) == set(info["missing_keys"])
    assert set(report.unexpected) == set(info["unexpected_keys"])


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (lambda key: f"module.{key}", "DataParallel"),
        (lambda key: f"_orig_mod.{key}", r"torch\.compile"),
        (lambda key: key.replace("model", "encoder").replace("lm_head", "top"), "another model"),
    ],
)
def test_checkpoint_of_which_nothing_fits_is_an_error_that_says_why(llama, rename, told):
    file = llama / "model.safetensors"
    tensors = {rename(key): tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})

    report = patchlab.check_checkpoint(llama, mapping={})

    assert not report.ok
    with pytest.raises(FindingsError, match=told):
        report.check()


def test_model_inside_of_a_wrapper_is_the_target(llama):
    model = transformers.LlamaForCausalLM(llama_config())

    for target in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert not patchlab.check_checkpoint(target, llama, {}).findings


def test_root_that_is_replaced_by_any_module_is_judged(llama):
    report = patchlab.check_checkpoint(llama, None, {"LlamaForCausalLM": SubMLP})

    assert report.class_name == "SubMLP"
    assert not report.ok


def test_whole_numbers_for_fractions_are_told(llama):
    file = llama / "model.safetensors"
    tensors = load_file(file)
    tensors |= {k: t.to(torch.int8) for k, t in tensors.items() if "up_proj" in k}
    save_file(tensors, file, metadata={"format": "pt"})

    report = patchlab.check_checkpoint(llama, None, {})

    (finding,) = report.findings
    assert "up_proj.weight (2) are stored as torch.int8" in finding.message


def test_keys_of_a_quantizer_are_a_warning_that_says_so(llama):
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (llama / "config.json").write_text(json.dumps(config))
    file = llama / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if "proj" in key]:
        tensors[key.replace("weight", "qweight")] = tensors.pop(key).to(torch.int32)
    save_file(tensors, file, metadata={"format": "pt"})

    report = patchlab.check_checkpoint(llama, None, {"LlamaMLP": SubMLP})

    assert report.ok
    assert any("quantized (gptq)" in finding.message for finding in report.findings)


def test_report_of_a_foreign_checkpoint_stays_short(llama):
    file = llama / "model.safetensors"
    tensors = load_file(file) | {f"x{i}.y{i * i}": torch.zeros(1) for i in range(3000)}
    save_file(tensors, file, metadata={"format": "pt"})

    report = patchlab.check_checkpoint(llama, None, {"LlamaMLP": SubMLP})

    assert len(report.unexpected) == 3000
    assert len(report.to_text()) < 1500
    assert len(report.to_html()) < 6000


def test_tied_head_is_not_missing(tmp_path):
    transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True)).save_pretrained(tmp_path)

    assert patchlab.check_checkpoint(tmp_path, mapping={}).missing == ()


def test_shapes_that_differ_are_told_with_both(llama):
    report = patchlab.check_checkpoint(llama_config(intermediate_size=48), llama, {})

    assert len(report.mismatched) == 6
    assert report.mismatched[0].found == (32, 64)
    assert report.mismatched[0].wanted == (32, 48)
    assert codes(report) == ["PL301"]


# New parameters and constants


class Garbage(LlamaMLP):
    """Nothing initializes what it adds."""

    def __init__(self, config):
        super().__init__(config)
        self.bias2 = nn.Parameter(torch.full((4,), 7.0))
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)
        self.offset = torch.full((2,), 5.0)


class Initialized(LlamaMLP):
    """Initializes itself what it adds."""

    def __init__(self, config):
        super().__init__(config)
        self.bias2 = nn.Parameter(torch.empty(4))
        self.register_buffer("scale", torch.empty(2), persistent=False)

    def init_new_weights(self):
        init.constant_(self.bias2, 7.0)
        init.constant_(self.scale, 3.0)
        init.zeros_(self.up_proj.weight)


class WithLinear(LlamaMLP):
    """Adds a module that the model itself knows how to initialize."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(3, 3)


def test_new_parameter_that_nothing_initializes_is_an_error(llama):
    report = patchlab.check_checkpoint(llama, None, {"LlamaMLP": Garbage})

    (weights,) = report.classes
    assert weights.uninitialized == ("model.layers.0.mlp.bias2", "model.layers.1.mlp.bias2")
    assert "Not initialized" in report.to_text().splitlines()[1]
    assert "model.layers.0.mlp.scale" in weights.constants
    assert "model.layers.0.mlp.offset" in weights.constants
    assert codes(report) == ["PL301", "PL303"]
    assert "init_new_weights" in report.findings[0].message


def test_parameter_that_the_replacement_initializes_is_fine(llama):
    report = patchlab.check_checkpoint(llama, None, {"LlamaMLP": Initialized})

    (weights,) = report.classes
    assert report.ok
    assert weights.initialized == ("model.layers.0.mlp.bias2", "model.layers.1.mlp.bias2")
    assert weights.uninitialized == weights.random == weights.constants == ()
    assert "By its own code" in report.to_text().splitlines()[1]
    assert "Not initialized" not in report.to_text()


def test_parameter_that_the_model_initializes_is_told_to_be_random(llama):
    report = patchlab.check_checkpoint(llama, None, {"LlamaMLP": WithLinear})

    (weights,) = report.classes
    assert report.ok
    assert len(weights.random) == 4
    assert codes(report, "warning") == ["PL301"]


@pytest.mark.parametrize("build", ["from_pretrained", "from_config"])
@pytest.mark.parametrize("way", ["scope", "registered"])
def test_replacement_initializes_what_the_checkpoint_lacks_and_nothing_else(llama, build, way):
    def make():
        auto = transformers.AutoModelForCausalLM
        return (
            auto.from_pretrained(llama)
            if build == "from_pretrained"
            else auto.from_config(transformers.AutoConfig.from_pretrained(llama))
        )

    if way == "scope":
        with patchlab.patched({"LlamaMLP": Initialized}):
            model = make()
    else:
        patchlab.register_patch_mapping({"LlamaMLP": Initialized})
        try:
            model = make()
        finally:
            patchlab.clear_patch_mapping()

    mlp = model.model.layers[1].mlp
    assert mlp.bias2.tolist() == [7, 7, 7, 7]
    assert mlp.scale.tolist() == [3, 3]
    assert bool(mlp.up_proj.weight.any()) is (build == "from_pretrained")


def test_initializer_is_not_called_when_no_patch_is_there():
    base = transformers.PreTrainedModel
    before = base._initialize_weights

    with patchlab.patched({"LlamaMLP": Initialized}):
        transformers.LlamaModel(llama_config())
        assert base._initialize_weights is not before

    assert base._initialize_weights is before


# Bad input


def test_model_without_a_checkpoint_asks_for_one():
    with pytest.raises(CheckpointError, match="no checkpoint is given"):
        patchlab.check_checkpoint(llama_config())


def test_check_leaves_the_model_alone(llama):
    model = transformers.LlamaForCausalLM(llama_config())
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}

    patchlab.check_checkpoint(model, llama, {"LlamaMLP": Garbage})

    after = model.state_dict(keep_vars=True)
    assert all(torch.equal(after[name], copy) for name, (_, copy) in before.items())


def test_config_with_the_name_of_a_dtype_is_built():
    """`save_pretrained` leaves one behind in the config of a live model."""
    config = llama_config()
    config.dtype = "float16"
    seen = []

    class Reading(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            seen.append(config.dtype)

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    patchlab.preview(model, {"LlamaMLP": Reading})

    assert set(seen) == {torch.float16}


class NarrowMLP(LlamaMLP):
    """One of its weights has another shape, one is new."""

    def __init__(self, config):
        super().__init__(config)
        self.up_proj = nn.Linear(config.hidden_size, 48, bias=False)


def test_class_whose_shapes_differ_is_shown_as_such(tmp_path):
    """The row of a class never says that all is well where a load is refused."""
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)

    report = patchlab.check_checkpoint(tmp_path, None, {"LlamaMLP": NarrowMLP})

    (weights,) = report.classes
    assert weights.state == "mismatched"
    assert weights.mismatched == tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
    assert not set(weights.mismatched) & {*weights.loaded, *weights.converted}
    assert len(weights.loaded) == 4
    (row,) = report.to_table().rows
    assert (row.mark, row.tone, row.note) == ("✕", "error", "mismatched")
    assert "Mismatched" in report.to_text()


def test_class_whose_weights_went_nowhere_is_not_shown_as_loaded(tmp_path):
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)

    report = patchlab.check_checkpoint(
        tmp_path, None, {"LlamaAttention": fused(LlamaAttention), "LlamaMLP": SubMLP}
    )

    states = {w.original: w.state for w in report.classes}
    assert states == {"LlamaAttention": "NOT loaded", "LlamaMLP": "loaded"}
    marks = {row.label: (row.mark, row.tone) for row in report.to_table().rows}
    assert marks == {"LlamaAttention": ("✕", "error"), "LlamaMLP": ("●", "match")}


@pytest.mark.parametrize("kind", ["model", "state dict"])
def test_weights_in_memory_are_refused_in_a_few_words(kind):
    """Not with the value, which has thousands of lines, and with the way to a file."""
    model = transformers.LlamaForCausalLM(llama_config())
    given = model if kind == "model" else model.state_dict()

    with pytest.raises(CheckpointError, match=r"save_pretrained\(folder\)") as refused:
        patchlab.check_checkpoint(model, given)

    assert len(str(refused.value)) < 400
    assert type(given).__name__ in str(refused.value)
