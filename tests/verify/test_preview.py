"""A preview says what a mapping would replace and what is wrong with it, before any build."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.monkey_patching import register_patch_mapping as upstream_register

import patchlab
from patchlab.errors import FindingsError, MappingError, TargetError
from tests.toys import (
    CountingAttention,
    PlainMLP,
    SubAttention,
    SubMLP,
    bert_config,
    llama_config,
    llava_config,
    qwen2_moe_config,
)


class InnerAttention(BertSelfAttention):
    pass


class Anything(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


def codes(preview, severity=None):
    return [f.code for f in preview.findings if severity in (None, f.severity)]


def finding(preview, code):
    found = [f for f in preview.findings if f.code == code]
    assert found, f"no {code} among {codes(preview)}"
    return found[0]


def test_the_bert_trap_is_an_error_with_the_narrower_key():
    preview = patchlab.preview(bert_config(), {".*Attention": InnerAttention})
    trap = finding(preview, "PL101")
    assert (trap.severity, trap.subject) == ("error", "BertAttention")
    assert "BertSelfAttention" in trap.message
    assert "(2 of 2)" in trap.message
    assert trap.suggestion == "^Bert(?:Cross|Self)Attention$"
    assert preview.counts == {".*Attention": 4}
    assert not preview.ok
    assert preview.marks["encoder.layer.0.attention"].note == "container"
    assert preview.marks["encoder.layer.0.attention.self"].note == "swallowed"
    with pytest.raises(FindingsError, match="PL101"):
        preview.check()


def test_the_suggested_key_is_right_as_it_stands():
    trap = patchlab.preview(bert_config(), {".*Attention": InnerAttention}).findings[0]
    preview = patchlab.preview(bert_config(), {trap.suggestion: InnerAttention})
    assert preview.ok
    assert preview.check() is preview
    assert preview.counts == {trap.suggestion: 2}
    with patchlab.patched({trap.suggestion: InnerAttention}) as report:
        transformers.BertModel(bert_config())
    assert report.counts == preview.counts


@pytest.mark.parametrize(
    ("config", "mapping"),
    [
        (bert_config(), {".*Attention": InnerAttention}),
        (bert_config(), {"^BertSelfAttention$": InnerAttention}),
        (llama_config(), {"LlamaMLP": PlainMLP, "LlamaAttention": SubAttention}),
        (llama_config(), {".*MLP$": SubMLP}),
        (qwen2_moe_config(), {".*MoeExperts$": Anything}),
    ],
)
def test_the_after_tree_is_the_patched_model_path_for_path(config, mapping):
    preview = patchlab.preview(config, mapping)
    with patchlab.patched(mapping, on_finding="ignore"):
        model = transformers.AutoModel.from_config(config)
    assert preview.after.fqns == patchlab.module_tree(model).fqns
    assert [n.class_name for n in preview.after.nodes] == [
        n.class_name for n in patchlab.module_tree(model).nodes
    ]


def test_a_target_may_be_a_model_a_config_or_a_folder(tmp_path):
    model = transformers.LlamaForCausalLM(llama_config())
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # never read
    previews = [patchlab.preview(t, {"LlamaMLP": SubMLP}) for t in (model, model.config, tmp_path)]
    assert [p.counts for p in previews] == [{"LlamaMLP": 2}] * 3
    assert len({p.before.root.class_name for p in previews[:1] + previews[2:]}) == 1
    assert all(tensor.device.type == "cpu" for tensor in model.parameters())


def test_nothing_is_left_behind_and_nothing_else_imported():
    patchlab.preview(llama_config(), {".*": Anything})
    before = {name for name in sys.modules if name.startswith("transformers.")}
    patchlab.preview(llama_config(), {".*Attention": Anything})
    assert {name for name in sys.modules if name.startswith("transformers.")} == before
    assert type(LlamaModel(llama_config()).layers[0].self_attn) is LlamaAttention


def test_an_open_scope_around_the_preview_does_not_show_in_it():
    with patchlab.patched({"LlamaMLP": SubMLP}):
        preview = patchlab.preview(llama_config(), {"LlamaAttention": SubAttention})
    assert "SubMLP" not in {node.class_name for node in preview.after.nodes}


def test_what_is_registered_is_previewed_without_a_mapping():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    try:
        assert patchlab.preview(llama_config()).counts == {"LlamaMLP": 2}
    finally:
        patchlab.clear_patch_mapping()


@pytest.mark.parametrize("register", [patchlab.register_patch_mapping, upstream_register])
def test_what_is_registered_does_not_show_in_the_trees_of_another_mapping(register):
    """Sub-models are built with from_config, which applies what is registered."""
    register({"LlamaMLP": SubMLP})
    try:
        preview = patchlab.preview(llava_config(), {"LlamaAttention": SubAttention})
        with patchlab.patched({"LlamaAttention": SubAttention}) as report:
            model = transformers.AutoModel.from_config(llava_config())
        names = [{n.class_name for n in t.nodes} for t in (preview.before, preview.after)]
        assert not any("SubMLP" in found for found in names)
        assert {row.before_class for row in report.models[0].diff.rows} >= {"LlamaMLP"}
        assert model is not None
    finally:
        patchlab.clear_patch_mapping()


@pytest.mark.parametrize("target", [3, None, "no/such/folder", object(), nn.Linear])
def test_what_is_no_target_is_refused(target):
    with pytest.raises(TargetError):
        patchlab.preview(target, {"LlamaMLP": SubMLP})


def test_a_module_without_a_config_is_shown_as_it_is():
    preview = patchlab.preview(nn.Sequential(LlamaMLP(llama_config())), {"LlamaMLP": SubMLP})
    assert preview.counts == {"LlamaMLP": 1}
    assert preview.after is None


def test_a_bad_mapping_is_refused_at_the_door():
    with pytest.raises(MappingError, match="glob"):
        patchlab.preview(llama_config(), {"*MLP": SubMLP})


class NeedsMore(LlamaMLP):
    def __init__(self, config, extra):
        super().__init__(config)


class Raising(nn.Module):
    def __init__(self, config):
        super().__init__()
        raise LookupError("no weights for me")


def test_a_constructor_that_does_not_bind_is_told_with_the_real_call():
    preview = patchlab.preview(llama_config(), {"LlamaMLP": NeedsMore})
    told = finding(preview, "PL201")
    assert told.severity == "error"
    assert "(config)" in told.message
    assert "extra" in told.message
    assert preview.after is None
    assert codes(preview, "error") == ["PL201"]


def test_a_constructor_that_raises_is_a_finding_and_no_traceback():
    told = finding(patchlab.preview(llama_config(), {"LlamaMLP": Raising}), "PL201")
    assert "LookupError: no weights for me" in told.message
    assert "Raising.__init__" in told.message


class RenamedExperts(Qwen2MoeExperts):
    """Its original's initializer looks for parameters that it does not have."""

    def __init__(self, config):
        nn.Module.__init__(self)
        self.up = nn.Parameter(torch.empty(2, 2))


def test_a_failing_initializer_is_told_with_its_branch():
    told = finding(
        patchlab.preview(qwen2_moe_config(), {"Qwen2MoeExperts": RenamedExperts}), "PL204"
    )
    assert "_init_weights" in told.message
    assert "from_pretrained" in told.message
    assert "gate_up_proj" in told.message
    assert told.subject == "RenamedExperts"


class LazyMLP(nn.Module):
    """Holds a layer whose parameters have no shape until the first call."""

    def __init__(self, config):
        super().__init__()
        self.down = nn.LazyLinear(config.hidden_size)

    def forward(self, hidden_states):
        return self.down(hidden_states)


def test_an_initializer_that_fails_in_what_a_replacement_holds_is_told():
    told = finding(patchlab.preview(llama_config(), {"LlamaMLP": LazyMLP}), "PL204")
    assert told.subject == "LazyLinear"
    assert "uninitialized parameter" in told.message
    assert " at 0x" not in told.message
    lazy = patchlab.patched({"LlamaMLP": LazyMLP})
    with pytest.raises(ValueError, match="uninitialized parameter"), lazy:
        transformers.LlamaModel(llama_config())


class OtherCacheName(LlamaAttention):
    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, kv=None, **kwargs
    ):
        return super().forward(hidden_states, position_embeddings, attention_mask)


class TooFew(LlamaAttention):
    def forward(self, hidden_states, position_embeddings):
        return hidden_states, None


def test_a_cache_swallowed_by_kwargs_is_an_error():
    """Logits would be right, and generation silently wrong."""
    told = finding(patchlab.preview(llama_config(), {"LlamaAttention": OtherCacheName}), "PL202")
    assert told.severity == "error"
    assert "generation" in told.message


def test_an_argument_that_is_passed_and_not_taken_is_an_error():
    told = finding(patchlab.preview(llama_config(), {"LlamaAttention": TooFew}), "PL202")
    assert "attention_mask" in told.message


class OneValue(LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0]


def test_another_number_of_return_values_is_an_error():
    told = finding(patchlab.preview(llama_config(), {"LlamaAttention": OneValue}), "PL203")
    assert told.severity == "error"
    assert "2 values" in told.message
    assert "a tensor" in told.message


class PlainLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.inner = LlamaDecoderLayer(config, layer_idx)

    def forward(self, hidden_states, **kwargs):
        return self.inner(hidden_states, **kwargs)


class MyLayer(LlamaDecoderLayer):
    pass


def test_a_lost_base_class_and_a_lost_name_are_told():
    preview = patchlab.preview(llama_config(), {"LlamaDecoderLayer": PlainLayer})
    messages = " ".join(f.message for f in preview.findings if f.code == "PL204")
    assert "GradientCheckpointingLayer" in messages


def test_a_name_in_no_split_modules_is_told_even_for_a_subclass():
    preview = patchlab.preview(llama_config(), {"LlamaDecoderLayer": MyLayer})
    told = finding(preview, "PL204")
    assert "_no_split_modules" in told.message
    assert told.severity == "warning"


def test_a_matched_sub_model_is_an_error_unless_subclassed():
    class MyLlama(LlamaModel):
        pass

    config = llama_config(architectures=["LlamaForCausalLM"])
    assert (
        finding(patchlab.preview(config, {"^LlamaModel$": Anything}), "PL106").severity == "error"
    )
    assert "PL106" not in codes(patchlab.preview(config, {"^LlamaModel$": MyLlama}))


def test_modules_that_go_unmatched_are_told():
    class Bare(Anything):
        def forward(self, hidden_states, *args, **kwargs):
            return (hidden_states, None)

    told = finding(patchlab.preview(bert_config(), {"^BertAttention$": Bare}), "PL107")
    assert told.severity == "warning"
    assert "BertSelfAttention" in told.message


def test_several_signatures_under_one_rule_are_told():
    told = finding(patchlab.preview(llama_config(), {"MLP$|Attention$": Anything}), "PL108")
    assert "constructors differ" in told.message


def test_several_sub_models_under_one_rule_are_told_and_counted():
    preview = patchlab.preview(llava_config(), {".*Attention$": Anything})
    assert "several sub-models" in finding(preview, "PL108").message
    counts = preview.counts_by_sub_model
    assert sorted(sum(c.values()) for c in counts.values()) == [2, 2]
    assert "language_model" in " ".join(counts)


def test_a_replacement_of_forward_alone_is_told_of_the_interfaces():
    told = finding(
        patchlab.preview(bert_config(), {"BertSelfAttention": CountingAttention}), "PL109"
    )
    assert told.severity == "info"
    assert "AttentionInterface" in told.message


def test_an_exact_name_that_transformers_would_search_is_told():
    told = finding(patchlab.preview(bert_config(), {"BertLayer": Anything}), "PL102")
    assert "ConvBertLayer" in told.message
    assert told.suggestion == "^BertLayer$"
    assert "PL102" not in codes(patchlab.preview(bert_config(), {"^BertLayer$": Anything}))


def test_names_that_are_no_modules_are_told():
    told = finding(patchlab.preview(llama_config(), {"^Llama": Anything}), "PL103")
    assert "Llama4Config" in told.message


def test_dead_keys_are_counted_as_zero_and_explained():
    preview = patchlab.preview(llama_config(), {"LLaMADecoderLayer": SubMLP, "LlamaMLP": SubMLP})
    assert preview.counts == {"LLaMADecoderLayer": 0, "LlamaMLP": 2}
    assert finding(preview, "PL104").suggestion == "LlamaDecoderLayer"
    assert [f.key for f in preview.findings if f.code == "PL102"] == ["LlamaMLP"]


def test_a_key_that_replaces_nothing_is_not_advised_to_be_anchored():
    """'^MLP$' would replace nothing either."""
    preview = patchlab.preview(llama_config(), {"MLP": Anything})
    assert finding(preview, "PL104").suggestion == "LlamaMLP"
    assert "PL102" not in codes(preview)


@pytest.mark.parametrize(
    ("key", "config"),
    [(".*MoeExperts$", qwen2_moe_config()), ("^Llama\\d+Attention$", llama_config())],
)
def test_the_guides_patterns_are_judged_by_what_they_match_today(key, config):
    preview = patchlab.preview(config, {key: Anything})
    if key == ".*MoeExperts$":
        assert preview.counts == {key: 2}
    else:
        assert "PL104" in codes(preview)


def test_each_cause_is_told_once_however_many_modules_match():
    few = patchlab.preview(bert_config(num_hidden_layers=1), {".*Attention": InnerAttention})
    many = patchlab.preview(bert_config(num_hidden_layers=8), {".*Attention": InnerAttention})
    assert codes(few) == codes(many)


def test_text_and_html_tell_the_states_and_escape_names():
    preview = patchlab.preview(bert_config(), {".*Attention": InnerAttention})
    text = preview.to_text()
    assert "4 modules replaced by 1 rule in BertModel" in text
    assert "✕ attention" in text
    assert "swallowed" in text
    html = preview.to_html()
    assert "<script" not in html
    assert "<style" not in html
    assert "line-through" in html
    assert preview.to_text() == patchlab.preview(bert_config(), preview.mapping).to_text()
