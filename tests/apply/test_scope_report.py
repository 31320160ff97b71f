"""The report of a scope says what was replaced and what is odd, once for each cause."""

from __future__ import annotations

import gc
import weakref

import pytest
import transformers
from transformers.models.bert.modeling_bert import BertSelfAttention

import patchlab
from patchlab.errors import FindingsError, NothingReplacedWarning, OverMatchWarning, PatchlabWarning
from tests.toys import (
    CountingAttention,
    OtherMLP,
    RefusingMLP,
    SubAttention,
    SubMLP,
    bert_config,
    llama_config,
)


class InnerAttention(BertSelfAttention):
    pass


def test_the_report_counts_what_was_replaced_and_says_where():
    with patchlab.patched({"^BertSelfAttention$": CountingAttention}) as report:
        model = transformers.BertModel(bert_config())
        assert not report.restored
    assert report.restored
    (built,) = report.models
    assert built.model is model
    assert built.replacements[0].fqns == tuple(
        f"encoder.layer.{i}.attention.self" for i in range(2)
    )
    assert report.to_text() == "BertModel: 2 × BertSelfAttention → CountingAttention · restored"
    rows = {row.fqn: row.status for row in built.diff.rows}
    assert [f for f, s in rows.items() if s == "replaced"] == list(built.replacements[0].fqns)


def test_the_report_keeps_no_model_alive():
    with patchlab.patched({"LlamaMLP": SubMLP}) as report:
        reference = weakref.ref(transformers.AutoModel.from_config(llama_config()))
        gc.collect()
        assert reference() is None
    assert report.counts == {"LlamaMLP": 2}
    assert [m.class_name for m in report.models] == ["LlamaModel"]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("key", ["LlamaModel", "LlamaForCausalLM"])
def test_a_model_that_is_replaced_itself_is_reported_also_when_it_is_gone(key, kept):
    original = getattr(transformers, key)
    with patchlab.patched({key: type(f"My{key}", (original,), {})}) as report:
        model = transformers.AutoModelForCausalLM.from_config(llama_config())
        if not kept:
            del model
            gc.collect()
    assert [m.counts for m in report.models] == [{key: 1}] == [report.counts]
    assert report.models[0].summary == f"1 × {key} → My{key}"


def test_several_models_are_reported_each():
    with patchlab.patched({".*MLP$": SubMLP}) as report:
        models = [transformers.LlamaModel(llama_config(num_hidden_layers=n)) for n in (1, 3)]
        head = transformers.LlamaForCausalLM(llama_config())
    assert [m.class_name for m in report.models] == ["LlamaModel"] * 2 + ["LlamaForCausalLM"]
    assert [m.counts[".*MLP$"] for m in report.models] == [1, 3, 2]
    assert [m.model for m in report.models] == [*models, head]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("Linear$", "torch's own"),
        ("LLaMADecoderLayer", "'LlamaDecoderLayer'"),
        ("BertLayer", "of which no model here has a module"),
        ("NoSuchThing", "no class has such a name"),
    ],
)
def test_a_key_that_replaced_nothing_warns_once_with_the_reason(key, reason):
    def build_two():
        with patchlab.patched({key: SubMLP, "LlamaMLP": SubMLP}) as report:
            transformers.LlamaModel(llama_config())
            transformers.LlamaModel(llama_config())
        return report

    with pytest.warns(NothingReplacedWarning, match=reason) as warned:
        report = build_two()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert [f.code for f in report.findings] == ["PL104"]


def test_a_rule_that_never_decides_is_told():
    scope = patchlab.patched({".*MLP$": SubMLP, "^LlamaML": OtherMLP})
    with pytest.warns(PatchlabWarning, match="PL105"), scope as report:
        transformers.LlamaModel(llama_config())
    assert [f.code for f in report.findings] == ["PL105"]


def test_a_scope_in_which_nothing_is_built_says_nothing():
    """Guards the two tests above: warnings are errors in this run."""
    with patchlab.patched({"NoSuchThing": SubMLP}) as report:
        pass
    assert report.to_text() == "no model was built · restored"


def test_findings_can_be_ignored():
    with patchlab.patched({"NoSuchThing": SubMLP}, on_finding="ignore") as report:
        transformers.LlamaModel(llama_config())
    assert [f.code for f in report.findings] == ["PL104"]


def test_a_key_whose_replacement_failed_is_not_called_dead():
    scope = patchlab.patched({"LlamaMLP": RefusingMLP})
    with pytest.raises(ValueError, match="refused"), scope as report:
        transformers.LlamaModel(llama_config())
    assert [f.code for f in report.findings] == []


def test_a_scope_warns_once_of_the_container_that_it_replaced():
    scope = patchlab.patched({".*Attention": InnerAttention})
    narrower = r"\^Bert\(\?:Cross\|Self\)Attention\$"

    def build_two():
        with scope:
            transformers.BertModel(bert_config())
            transformers.BertModel(bert_config())

    with pytest.warns(OverMatchWarning, match=narrower) as warned:
        build_two()
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_a_block_that_fails_is_still_told_of_the_container():
    scope = patchlab.patched({".*Attention": SubAttention})
    with pytest.warns(OverMatchWarning, match="BertAttention"), pytest.raises(TypeError), scope:
        transformers.BertModel(bert_config())


def test_errors_stop_the_block_before_it_runs():
    scope = patchlab.patched({".*Attention": InnerAttention}, on_finding="error")
    with pytest.raises(FindingsError, match="PL101"), scope:
        pytest.fail("the block must not run")
    with patchlab.patched({"^BertSelfAttention$": InnerAttention}, on_finding="error") as report:
        transformers.BertModel(bert_config())
    assert report.ok


def test_a_key_that_an_inner_scope_decides_is_told_of_as_such():
    """The outer scope's rule is not dead because the model had no such class."""
    scopes = [patchlab.patched({"LlamaMLP": mlp}) for mlp in (SubMLP, OtherMLP)]
    outer, inner = (scope.__enter__() for scope in scopes)
    model = transformers.LlamaModel(llama_config())
    scopes[1].__exit__(None, None, None)
    with pytest.warns(NothingReplacedWarning, match="one of an inner scope"):
        scopes[0].__exit__(None, None, None)
    assert (outer.counts, inner.counts) == ({"LlamaMLP": 0}, {"LlamaMLP": 2})
    assert "this model has none" not in str(outer)
    assert "LlamaMLP" in outer.models[0].class_names
    assert type(model.layers[0].mlp) is OtherMLP
