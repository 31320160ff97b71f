"""A key that replaced nothing is told why, by what exists and not by what is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import transformers
from torch import nn
from transformers import GroundingDinoConfig, LlamaModel, WhisperConfig

import patchlab
from patchlab.mapping.rules import PatchMapping
from patchlab.plan import dead_keys
from patchlab.plan.dead_keys import dead_key_findings
from tests.toys import SubMLP, bert_config, llama_config

WHISPER = WhisperConfig(encoder_layers=1, decoder_layers=1)
GROUNDING_DINO = GroundingDinoConfig(encoder_layers=1, decoder_layers=1)


class Mine(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


def dead(config, key):
    """Return the one finding of a key that replaces nothing; PL102 must not be there with it."""
    findings = patchlab.preview(config, {key: Mine}).findings
    assert "PL102" not in [f.code for f in findings]
    (found,) = [f for f in findings if f.code == "PL104"]
    return found


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("LlamaMLP", "LlamaMLP is a class of llama; this model has none"),
        ("GPT2MLP", "GPT2MLP is a class of gpt2; this model has none"),
        ("BertSelfAttention", "BertSelfAttention is a class of bert; this model has none"),
        ("T5Attention", "T5Attention is a class of t5; this model has none"),
        ("^T5Attention$", "T5Attention is a class of t5; this model has none"),
        ("LlamaConfig", "LlamaConfig is no module class"),
        ("AutoModel", "AutoModel is no module class"),
        ("BaseModelOutput", "BaseModelOutput is no module class"),
    ],
)
def test_a_class_of_another_model_is_said_to_exist_and_nothing_is_suggested(key, said):
    found = dead(WHISPER, key)
    assert said in found.message
    assert "no class has such a name" not in found.message
    assert "Did you mean" not in found.message
    assert found.suggestion == ""


def test_the_answer_does_not_depend_on_what_is_imported():
    code = (
        "import sys, patchlab; from torch import nn; from transformers import WhisperConfig\n"
        "config = WhisperConfig(encoder_layers=1, decoder_layers=1)\n"
        "found = patchlab.preview(config, {'LlamaMLP': type('Mine', (nn.Module,), {})}).findings\n"
        "assert 'transformers.models.llama.modeling_llama' not in sys.modules\n"
        "print(*(f.message for f in found if f.code == 'PL104'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == dead(WHISPER, "LlamaMLP").message


def test_many_model_types_and_classes_are_counted_and_not_all_listed():
    message = dead(WHISPER, "^(Bert|T5|GPT2)").message
    assert "more are classes of bert, bert_generation, gpt2 and" in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("config", "key", "suggestion", "search"),
    [
        (WHISPER, "Attention", "WhisperAttention", "'.*Attention' would search"),
        (WHISPER, "attention", "WhisperAttention", "'.*Attention' would search"),
        (llama_config(), "MLP", "LlamaMLP", "'.*MLP' would search"),
        (llama_config(), "RMSNorm", "LlamaRMSNorm", "'.*RMSNorm' would search"),
    ],
)
def test_a_part_of_a_name_gives_the_models_own_class_and_says_how_to_search(
    config, key, suggestion, search
):
    found = dead(config, key)
    assert found.suggestion == suggestion
    assert "An identifier is an exact name" in found.message
    assert search in found.message
    counts = patchlab.preview(config, {suggestion: Mine}).counts
    assert counts[suggestion] > 0


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("Encoder", "GroundingDinoEncoder"), ("SelfAttention", "BertSelfAttention")],
)
def test_a_part_of_a_name_gives_a_class_of_the_model_before_one_of_a_tower_in_it(key, suggestion):
    assert dead(GROUNDING_DINO, key).suggestion == suggestion


def test_a_part_of_names_of_other_models_alone_suggests_none_of_them():
    found = dead(llama_config(), "Experts")
    assert found.suggestion == ""
    assert "Did you mean" not in found.message


@pytest.mark.parametrize(
    ("config", "key", "suggestion"),
    [
        (llama_config(), "LlamaMPL", "LlamaMLP"),  # in the model
        (llama_config(), "LlamaForSequenceClasification", "LlamaForSequenceClassification"),
        (llama_config(), "BertSelfAtention", "BertSelfAttention"),  # elsewhere, and no such class
        (llama_config(), "Linaer", ""),  # torch's own are never replaced
    ],
)
def test_near_names_come_from_the_model_then_its_architecture_then_elsewhere(
    config, key, suggestion
):
    found = dead(config, key)
    assert "no class has such a name" in found.message
    assert found.suggestion == suggestion


@pytest.mark.parametrize("key", ["NoSuchThing", "GPT2MLP"])
def test_the_hint_names_the_models_own_classes_and_none_of_torch(key):
    message = dead(llama_config(), key).message
    assert "such as LlamaAttention, LlamaDecoderLayer and LlamaMLP." in message
    for name in ("Embedding", "Linear", "ModuleList"):
        assert name not in message


def test_a_scope_tells_the_same_as_a_preview():
    with patchlab.patched({"GPT2MLP": Mine}, on_finding="ignore") as report:
        transformers.BertModel(bert_config())
    (found,) = report.findings
    assert "GPT2MLP is a class of gpt2; this model has none." in found.message
    assert found == dead(bert_config(), "GPT2MLP")


def test_the_catalog_is_not_read_for_keys_that_replace_something(monkeypatch):
    def refuse():
        raise AssertionError("read")

    monkeypatch.setattr(dead_keys, "load_catalog", refuse)
    with patchlab.patched({"LlamaMLP": SubMLP}) as report:
        LlamaModel(llama_config())
    assert report.findings == ()
    with pytest.raises(AssertionError, match="read"):
        dead_key_findings(PatchMapping.of({"Foo": SubMLP}), {"Foo": 0}, {"LlamaMLP"})


def test_a_class_inside_a_module_that_is_swapped_whole_is_not_called_absent():
    model = LlamaModel(llama_config())
    counts = {"LlamaDecoderLayer": 2, "LlamaMLP": 0}
    names = {type(module).__name__ for module in model.modules()}
    mapping = PatchMapping.of({"LlamaDecoderLayer": Mine, "LlamaMLP": Mine})
    (found,) = dead_key_findings(mapping, counts, names, in_place=True)
    assert "LlamaMLP is in the model, but another rule decides there" in found.message


def test_a_class_of_torch_is_suggested_where_it_can_be_replaced():
    mapping = PatchMapping.of({"Linaer": Mine})
    names = {"Linear", "LlamaMLP"}
    (in_place,) = dead_key_findings(mapping, {"Linaer": 0}, names, in_place=True)
    (built,) = dead_key_findings(mapping, {"Linaer": 0}, names)
    assert (in_place.suggestion, built.suggestion) == ("Linear", "")


def test_a_class_of_ones_own_in_the_model_is_said_not_to_be_replaced_at_construction():
    (found,) = dead_key_findings(PatchMapping.of({"Mine": SubMLP}), {"Mine": 0}, {"Mine"})
    assert "Mine is in the model, but only classes of transformers are replaced" in found.message


def test_a_survey_of_the_whole_library_names_no_class_of_a_model():
    (found,) = patchlab.survey("Zzz").findings
    assert "no class has such a name. Look the name up in the tree" in found.message


@pytest.mark.parametrize(
    ("key", "suggestion", "fits"),
    [
        (".*mlp", ".*MLP", "LlamaMLP"),
        ("^llama.*norm$", "^Llama.*Norm$", "LlamaRMSNorm"),
        (r"(mlp|ffn)$", r"(MLP|ffn)$", "LlamaMLP"),
        (r"\w+(?i:x)?attention", r"\w+(?i:x)?Attention", "LlamaAttention"),
    ],
)
def test_a_pattern_in_another_case_gives_the_pattern_in_the_models_own(key, suggestion, fits):
    found = dead(llama_config(), key)
    assert f"Names are case-sensitive: the model has {fits}" in found.message
    assert found.suggestion == suggestion
    assert patchlab.preview(llama_config(), {suggestion: Mine}).counts[suggestion] > 0


@pytest.mark.parametrize("key", [".*Experts", r".*[m][l][p]$", ".*linear"])
def test_a_pattern_that_fits_nothing_of_the_model_in_any_spelling_is_not_respelled(key):
    """Nor is one whose letters stand in classes, nor one for torch's own."""
    found = dead(llama_config(), key)
    assert "Names are case-sensitive" not in found.message
