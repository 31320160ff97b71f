"""What is found out without running the patched skeleton is what running it shows."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import patchlab
from patchlab.mapping.rules import PatchMapping
from patchlab.model.skeleton import skeleton
from patchlab.model.tree import module_tree
from patchlab.verify import forward_evidence
from patchlab.verify.forward_calls import run_forward
from patchlab.verify.forward_evidence import observe_forwards
from patchlab.verify.preview import plan_for
from tests.toys import bert_config, llama_config, qwen2_moe_config


class Anything(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


class Fails(Anything):
    def forward(self, hidden_states, *args, **kwargs):
        raise RuntimeError("this forward never runs")


class Widens(Anything):
    def forward(self, hidden_states, *args, **kwargs):
        return torch.cat([hidden_states, hidden_states], dim=-1)


class CachingAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class PairMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x), None


class PlainBlock(Qwen2MoeSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


class CountingAttention(BertSelfAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs)


def both(config, mapping):
    """Return the plan, what was observed of both, and what a run of the patched one shows."""
    rules = PatchMapping.of(mapping)
    model = skeleton(config)
    with patchlab.patched(mapping, on_finding="ignore"):
        patched = skeleton(config)
    before = module_tree(model)
    plan = plan_for(before, rules)
    unpatched, observed = observe_forwards(model, before, patched, plan)
    return plan, unpatched, observed, run_forward(patched, [r.fqns[0] for r in plan])


@pytest.mark.parametrize(
    ("config", "mapping"),
    [
        (llama_config(), {"LlamaMLP": Anything}),
        (llama_config(), {"LlamaMLP": PairMLP}),
        (llama_config(), {"LlamaAttention": CachingAttention}),
        (llama_config(), {"LlamaAttention": Anything}),
        (llama_config(), {"LlamaMLP": Fails}),
        (llama_config(), {"LlamaMLP": Widens}),
        (llama_config(), {"LlamaDecoderLayer": Anything}),
        (llama_config(), {"LlamaMLP": Anything, "LlamaAttention": CachingAttention}),
        (bert_config(), {"BertSelfAttention": CountingAttention}),
        (bert_config(), {".*Attention": Anything}),
        (bert_config(), {"BertIntermediate": Anything}),
        (qwen2_moe_config(), {"Qwen2MoeSparseMoeBlock": PlainBlock}),
        (qwen2_moe_config(), {".*Experts$": Anything}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else type(value).__name__,
)
def test_what_is_observed_is_what_a_run_of_the_patched_model_shows(config, mapping):
    plan, unpatched, observed, run = both(config, mapping)
    assert plan
    if unpatched.failure:  # nothing can be said by comparing
        assert not observed.calls
        return
    told = [(observed.calls.get(r.fqns[0]), run.calls.get(r.fqns[0])) for r in plan]
    assert all(a.returned == b.returned for a, b in told if a is not None and b is not None)
    others = [
        mine.returned != unpatched.calls[r.fqns[0]].returned
        for r, (mine, _) in zip(plan, told, strict=True)
        if mine is not None
    ]
    # What returns another number of values is told as that, whatever fails for it later on.
    if not any(others):
        assert observed.failure == run.failure
        assert all(mine == theirs for mine, theirs in told)


def test_a_failure_around_a_replacement_of_the_same_arity_is_still_found():
    found = patchlab.preview(llama_config(), {"LlamaMLP": Widens}).findings
    assert any(f.code == "PL203" and "forward fails" in f.message for f in found), found


def test_another_shape_that_fits_by_broadcasting_is_told():
    class First(LlamaMLP):
        def forward(self, x):
            return super().forward(x)[0]

    class Same(LlamaMLP):
        def forward(self, x):
            return super().forward(x)[[0, 1, 2]]

    def told(cls):
        found = patchlab.preview(llama_config(), {"LlamaMLP": cls}).findings
        return [(f.severity, f.message) for f in found if f.code == "PL203"]

    ((severity, message),) = told(First)
    assert severity == "warning"
    assert "shape (3, 4, 32)" in message
    assert "one of (4, 32)" in message
    assert told(Same) == []


def test_what_asks_a_replacement_for_a_part_is_run_and_found():
    class Curious(transformers.LlamaModel):
        def forward(self, *args, **kwargs):
            assert self.layers[0].mlp.gate_proj is not None
            return super().forward(*args, **kwargs)

    found = patchlab.preview(Curious(llama_config()), {"LlamaMLP": Anything}).findings
    assert any("gate_proj" in f.message for f in found if f.code == "PL203"), found


def test_what_looks_at_the_class_of_a_replacement_is_run_and_found():
    class Strict(transformers.LlamaModel):
        def forward(self, *args, **kwargs):
            if not isinstance(self.layers[0].mlp, LlamaMLP):
                raise TypeError("a LlamaMLP is what I can work with")
            return super().forward(*args, **kwargs)

    found = patchlab.preview(Strict(llama_config()), {"LlamaMLP": Anything}).findings
    assert any("what I can work with" in f.message for f in found if f.code == "PL203"), found


def test_a_replacement_that_keeps_its_forward_is_missed_where_it_is_never_called():
    class Wider(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)

    class Around(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return self.mlp.down_proj(self.mlp.up_proj(hidden_states))

    class Calling(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return self.mlp(hidden_states)

    def idle(layer):
        mapping = {"LlamaMLP": Wider, "LlamaDecoderLayer": layer}
        found = patchlab.preview(llama_config(), mapping).findings
        return [f.subject for f in found if f.code == "PL205"]

    assert idle(Around) == ["LlamaMLP"]
    assert idle(Calling) == []


def test_a_forward_that_is_changed_in_between_is_run_again(monkeypatch):
    def pair(self, hidden_states, input_tensor):
        return hidden_states, None

    def messages():
        found = patchlab.preview(bert_config(), {"BertSelfOutput": Anything}).findings
        return [f.message for f in found if f.code == "PL203"]

    assert messages() == []
    monkeypatch.setattr(BertSelfOutput, "forward", pair)
    assert "returns 2 values" in messages()[0]
    monkeypatch.undo()
    assert messages() == []


def test_a_setting_that_is_changed_in_between_is_run_again():
    forward_evidence._remembered.clear()
    for implementation in ("eager", "sdpa"):
        config = bert_config()
        config._attn_implementation = implementation
        patchlab.preview(config, {"BertSelfAttention": CountingAttention})
    assert len(forward_evidence._remembered) == 2
    patchlab.preview(bert_config(), {"BertSelfAttention": CountingAttention})
    assert len(forward_evidence._remembered) == 2


def test_a_cache_does_not_grow_from_one_preview_to_the_next():
    for _ in range(3):
        found = patchlab.preview(llama_config(), {"LlamaAttention": CachingAttention}).findings
        assert not [f for f in found if f.severity == "error"], found
    runs = [r for r in forward_evidence._remembered.values() if "layers.0.self_attn" in r.arguments]
    given = [value for r in runs for value in r.arguments["layers.0.self_attn"][1].values()]
    caches = [value for value in given if isinstance(value, transformers.Cache)]
    assert caches
    assert all(cache.get_seq_length() == 0 for cache in caches)


def test_nothing_of_a_user_is_kept_alive_by_what_is_remembered():
    def build():
        class Own(LlamaMLP):
            def forward(self, x):
                return super().forward(x)

        class OwnModel(transformers.LlamaModel):
            pass

        patchlab.preview(llama_config(), {"LlamaMLP": Own})
        patchlab.preview(OwnModel(llama_config()), {"LlamaMLP": Own})
        return weakref.ref(Own), weakref.ref(OwnModel)

    refs = build()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_no_more_is_remembered_than_is_of_use():
    for layers in range(1, 20):
        patchlab.preview(llama_config(num_hidden_layers=layers), {"LlamaMLP": Anything})
    assert len(forward_evidence._remembered) <= 16
