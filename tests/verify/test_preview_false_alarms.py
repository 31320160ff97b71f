"""A preview raises no false alarm, and refuses what no model can be built from with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel, LlamaRMSNorm

import patchlab
from patchlab.errors import TargetError
from patchlab.model.skeleton import skeleton
from patchlab.plan.wording import needs_values
from tests.toys import SubMLP, llama_config


def told(preview, *severities):
    return [f.code for f in preview.findings if f.severity in severities]


def message(preview, code):
    return next(f.message for f in preview.findings if f.code == code)


class SubNorm(LlamaRMSNorm):
    pass


@pytest.mark.parametrize("key", ["^LlamaRMSNorm$", "LlamaRMSNorm$"])
def test_the_places_of_one_class_are_no_different_roles(key):
    preview = patchlab.preview(llama_config(), {key: SubNorm})
    assert sum(preview.counts.values()) > 2
    assert told(preview, "error", "warning") == []


class ReadsAnItem(LlamaMLP):
    def forward(self, x):
        return super().forward(x * 0 if x.abs().max().item() > 1e9 else x)


class ReadsIndices(LlamaMLP):
    def forward(self, x):
        return super().forward(x) if len((x > 1e9).nonzero()) else x


class ReadsAnArray(LlamaMLP):
    def forward(self, x):
        return super().forward(x + x.numpy().max())


class HoldsAConstant(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.ones(config.hidden_size, device="cpu")

    def forward(self, x):
        return super().forward(x * self.scale)


@pytest.mark.parametrize("cls", [ReadsAnItem, ReadsIndices, ReadsAnArray, HoldsAConstant])
def test_a_forward_that_needs_values_is_no_error(cls):
    assert told(patchlab.preview(llama_config(), {"^LlamaMLP$": cls}), "error", "warning") == []


def test_a_forward_that_fails_for_another_reason_still_is_an_error():
    class Breaks(LlamaMLP):
        def forward(self, x):
            raise ValueError("metadata of no use")

    preview = patchlab.preview(llama_config(), {"^LlamaMLP$": Breaks})
    assert "metadata of no use" in message(preview, "PL203")


def test_only_the_device_by_its_name_is_taken_for_the_meta_device():
    assert needs_values("Tensor.item() cannot be called on meta tensors")
    assert needs_values("The register_meta function for torch.nonzero() raises")
    assert not needs_values("MetaClipModel has no attribute 'metadata'")
    assert not needs_values("")


class ReadsWhenBuilt(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.ones(3).sum().item()


def test_a_constructor_that_reads_values_is_told_where_it_fails():
    preview = patchlab.preview(llama_config(), {"^LlamaMLP$": ReadsWhenBuilt})
    assert "on the meta device, where from_pretrained builds it" in message(preview, "PL201")


class ListWithForward(nn.ModuleList):
    def __init__(self, config):
        super().__init__([nn.Linear(config.hidden_size, config.hidden_size)])

    def forward(self, x):
        return self[0](x)


class ListWithoutForward(nn.ModuleList):
    def __init__(self, config):
        super().__init__([nn.Linear(config.hidden_size, config.hidden_size)])


def test_a_list_of_modules_with_a_forward_is_seen_to_be_called():
    preview = patchlab.preview(llama_config(), {"^LlamaMLP$": ListWithForward})
    assert told(preview, "error", "warning", "info") == ["PL501"]  # other names
    assert not patchlab.preview(llama_config(), {"^LlamaMLP$": ListWithoutForward}).ok


def test_a_class_in_its_own_place_is_told_as_such():
    preview = patchlab.preview(llama_config(), {"^LlamaMLP$": LlamaMLP})
    assert preview.counts == {"^LlamaMLP$": 0}
    assert "LlamaMLP is what the model has there already" in message(preview, "PL104")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"hidden_size": "x"}, "expected int"),
        ({"hidden_size": 30, "num_attention_heads": 7}, "not a multiple"),
        ({"architectures": ["BertModel"]}, "type_vocab_size"),
    ],
)
def test_a_config_that_builds_no_model_is_refused_with_the_reason(tmp_path, written, said):
    tmp_path.joinpath("config.json").write_text(json.dumps({"model_type": "llama", **written}))
    with pytest.raises(TargetError, match=said):
        patchlab.preview(tmp_path, {"LlamaMLP": SubMLP})
    with pytest.raises(TargetError, match=said):
        skeleton(tmp_path)


def test_a_class_is_refused_and_an_instance_asked_for():
    with pytest.raises(TargetError, match=r"the class LlamaModel.*give an instance"):
        patchlab.preview(LlamaModel, {"LlamaMLP": SubMLP})


@pytest.mark.parametrize("target", ["/no/such/folder", "./no-such", "~/no-such", Path("no-such")])
def test_a_path_that_is_not_there_is_said_to_be_none_and_taken_for_no_model_id(target):
    with pytest.raises(TargetError, match="there is no"):
        patchlab.preview(target, {"LlamaMLP": SubMLP})


@pytest.mark.parametrize("target", ["", "tiny.Q4_0.gguf"])
def test_a_gguf_file_is_named_with_the_way_to_its_model(tmp_path, target):
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(b"GGUF")

    said = re.escape(f"from_pretrained({str(tmp_path)!r}, gguf_file='tiny.Q4_0.gguf')")
    with pytest.raises(TargetError, match=said):
        patchlab.preview(tmp_path / target, {"LlamaMLP": SubMLP})


def test_a_gguf_file_beside_a_config_is_no_matter(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    llama_config().save_pretrained(tmp_path)

    assert patchlab.preview(tmp_path, {"LlamaMLP": SubMLP}).ok


def test_a_module_that_takes_more_than_its_config_is_judged_by_its_tree():
    layer = LlamaModel(llama_config()).layers[0]
    layer.config = llama_config()
    preview = patchlab.preview(layer, {"^LlamaMLP$": SubMLP})
    assert preview.counts == {"^LlamaMLP$": 1}
    assert preview.after is None


# torch's own, of what torch.compile imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_previewed_like_the_model():
    model = LlamaModel(llama_config())
    preview = patchlab.preview(torch.compile(model), {"^LlamaMLP$": SubMLP})
    assert preview.counts == {"^LlamaMLP$": 2}
    assert preview.after is not None
    assert preview.before.root.class_name == "LlamaModel"


def test_architectures_that_are_no_names_are_passed_over():
    config = llama_config()
    config.architectures = [None, 3]
    assert patchlab.preview(config, {"^LlamaMLP$": SubMLP}).counts == {"^LlamaMLP$": 2}
