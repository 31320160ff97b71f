"""Models record their outputs whether they were built before, during or after a patch.

That the recorders of classes and of transformers' registry are unchanged is asserted after each
test by the fixture `nothing_left_behind`.
"""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.utils import output_capturing

import patchlab
from patchlab.apply.recorders import adopt_recorders
from patchlab.errors import TargetError
from patchlab.mapping.rules import PatchMapping
from tests.toys import SubAttention, llama_config, qwen2_moe_config, tokens

OutputRecorder = output_capturing.OutputRecorder


class PlainAttention(nn.Module):
    """Not a subclass of the original: no recorder of the class finds it."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, *args, **kwargs):
        batch, length = hidden_states.shape[:2]
        return self.projection(hidden_states), torch.full((batch, 1, length, length), 7.0)


class PlainLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, *args, **kwargs):
        return self.projection(hidden_states)


class PlainRouter(nn.Module):
    """A router of its own making, with the outputs of `Qwen2MoeTopKRouter`."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size))

    def forward(self, hidden_states):
        logits = hidden_states.reshape(-1, self.weight.shape[1]) @ self.weight.T
        chosen, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, chosen, index


class SubRouter(modeling_qwen2_moe.Qwen2MoeTopKRouter):
    pass


def llama(attention="eager"):
    return transformers.LlamaModel(llama_config(attn_implementation=attention)).eval()


def attentions(model):
    return model(tokens(), output_attentions=True, use_cache=False).attentions


def hidden_states(model):
    return model(tokens(), output_hidden_states=True, use_cache=False).hidden_states


@pytest.mark.parametrize("replacement", [SubAttention, PlainAttention])
def test_attentions_are_recorded_before_during_and_after_a_scope(replacement):
    before, late = llama(), llama()
    assert len(attentions(before)) == 2
    with patchlab.patched({"LlamaAttention": replacement}):
        during = llama()
        fresh = llama()
        assert [len(attentions(m)) for m in (before, during)] == [2, 2]
    after = llama()
    for model in (before, late, during, fresh, after):
        assert len(attentions(model)) == 2
    assert isinstance(during.layers[0].self_attn, replacement)
    assert bool((attentions(during)[0] == 7).all()) == (replacement is PlainAttention)
    assert not (attentions(after)[0] == 7).all()


@pytest.mark.parametrize("build", ["by hand", "from_config", "from_pretrained"])
def test_every_way_to_build_records(build, tmp_path):
    config = llama_config(attn_implementation="eager")
    with patchlab.patched({"LlamaAttention": PlainAttention}):
        model = transformers.LlamaModel(config)
        if build == "from_config":
            model = transformers.AutoModel.from_config(config)
        elif build == "from_pretrained":
            model.save_pretrained(tmp_path)
            model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert [bool((a == 7).all()) for a in attentions(model.eval())] == [True, True]


def test_hidden_states_of_replaced_layers_are_recorded_with_the_first_one():
    with patchlab.patched({"LlamaDecoderLayer": PlainLayer}):
        model = llama()
    plain = llama()
    assert [len(hidden_states(m)) for m in (model, plain)] == [3, 3]
    first = hidden_states(model)[0]
    assert torch.equal(first, model.embed_tokens(tokens()))


@pytest.mark.parametrize("replacement", [SubRouter, PlainRouter])
def test_router_logits_are_recorded_once_for_each_layer(replacement):
    config = qwen2_moe_config()
    with patchlab.patched({"Qwen2MoeTopKRouter": replacement}):
        model = transformers.Qwen2MoeForCausalLM(config).eval()
    plain = transformers.Qwen2MoeForCausalLM(config).eval()
    for each in (model, plain):
        logits = each(tokens(), output_router_logits=True).router_logits
        assert [tuple(layer.shape) for layer in logits] == [(10, 4)] * 2


def test_a_sub_model_records_under_its_own_class():
    """The base model lies inside the one with a head, and is the one that records."""
    with patchlab.patched({"LlamaAttention": PlainAttention}):
        model = transformers.LlamaForCausalLM(llama_config(attn_implementation="eager")).eval()
    assert len(model(tokens(), output_attentions=True).attentions) == 2
    assert "_can_record_outputs" in vars(model.model)


@pytest.mark.parametrize("first", ["patched", "plain"])
def test_two_models_of_one_class_do_not_disturb_each_other(first):
    """Hooks are installed at the first recording forward, whichever model comes first."""
    plain = llama()
    with patchlab.patched({"LlamaAttention": PlainAttention}):
        model = llama()
    for each in (model, plain) if first == "patched" else (plain, model):
        assert len(attentions(each)) == 2
    assert [(a == 7).all().item() for a in attentions(model)] == [True, True]
    assert [(a == 7).all().item() for a in attentions(plain)] == [False, False]


def test_models_that_install_their_hooks_at_once_record_their_own():
    """Many threads, half of them with a patched model, all of one class."""
    with patchlab.patched({"LlamaAttention": PlainAttention}):
        models = [llama() for _ in range(4)]
    models += [llama() for _ in range(4)]
    seen: dict[int, list[bool]] = {}
    barrier = threading.Barrier(len(models))

    def record(i):
        barrier.wait()
        seen[i] = [bool((a == 7).all()) for a in attentions(models[i])]

    threads = [threading.Thread(target=record, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {i: [i < 4] * 2 for i in range(8)}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_patched_model_records(copied):
    with patchlab.patched({"LlamaAttention": PlainAttention}):
        model = llama()
    twin = copied(model)
    assert [(a == 7).all().item() for a in attentions(twin)] == [True, True]


def test_a_copy_made_after_recording_records_once_for_each_layer():
    with patchlab.patched({"LlamaAttention": PlainAttention}):
        model = llama()
    attentions(model)
    assert len(attentions(copy.deepcopy(model))) == 2


def test_the_class_and_the_registry_are_not_changed():
    recorders = modeling_llama.LlamaModel._can_record_outputs
    noted = dict(recorders)
    with patchlab.patched({"LlamaDecoderLayer": PlainLayer}):
        model = llama()
        assert vars(model)["_can_record_outputs"] is not recorders
    hidden_states(model)
    assert modeling_llama.LlamaModel._can_record_outputs is recorders
    assert recorders == noted
    registered = dict.get(
        output_capturing._CAN_RECORD_REGISTRY, str(transformers.LlamaModel), recorders
    )
    assert registered == noted


def test_nothing_is_put_on_a_model_whose_recorders_need_no_change():
    """Guards the tests above: a subclass is found by the recorders of the class already."""
    with patchlab.patched({"LlamaAttention": SubAttention}):
        model = llama()
    assert "_can_record_outputs" not in vars(model)


def by_hand():
    """A model that somebody built with `PlainAttention` put in afterwards."""
    model = llama()
    for i, layer in enumerate(model.layers):
        layer.self_attn = PlainAttention(model.config, i)
    return model


def test_patch_output_recorders_lets_a_model_made_by_hand_record():
    model = by_hand()
    assert attentions(by_hand()) == ()  # guards the assertion below
    patchlab.register_patch_mapping({"LlamaAttention": PlainAttention})
    try:
        patchlab.patch_output_recorders(model)
        patchlab.patch_output_recorders(model)
    finally:
        patchlab.clear_patch_mapping()
    assert len(attentions(model)) == 2
    assert len(attentions(llama())) == 2


@pytest.mark.parametrize("given", [None, "LlamaModel", transformers.LlamaModel])
def test_patch_output_recorders_of_anything_else_is_refused(given):
    with pytest.raises(TargetError, match="takes a model"):
        patchlab.patch_output_recorders(given)


class Original(nn.Module):
    pass


class Replacement(nn.Module):
    pass


class SubReplacement(Original):
    pass


def holder(spec):
    """A module whose class says that it can record."""
    return type("Holder", (nn.Module,), {"_can_record_outputs": {"output": spec}})()


def targets(model) -> list:
    found = model._can_record_outputs["output"]
    found = found if isinstance(found, list) else [found]
    return [spec.target_class if isinstance(spec, OutputRecorder) else spec for spec in found]


@pytest.mark.parametrize("key", ["Original", "^Orig"])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (OutputRecorder(Original, index=2), [Original, Replacement]),
        (Original, [Original, Replacement]),
        ("Original", ["Original", Replacement]),
        (OutputRecorder(None, class_name="Original"), [None, Replacement]),
        ([Original, "other"], [Original, "other", Replacement]),
        ((Original,), [Original, Replacement]),
        (OutputRecorder((nn.Linear, Original)), [(nn.Linear, Original), Replacement]),
    ],
)
def test_every_form_of_a_recorder_finds_the_replacement(key, spec, expected):
    model = holder(spec)
    of_class = dict(type(model)._can_record_outputs)
    for _ in range(2):  # the second time adds nothing
        adopt_recorders(model, [PatchMapping.of({key: Replacement})])
        assert targets(model) == expected
    assert type(model)._can_record_outputs == of_class


def test_what_a_recorder_says_besides_its_class_is_kept():
    model = holder(OutputRecorder(Original, index=2, layer_name="x.y"))
    adopt_recorders(model, [PatchMapping.of({"Original": Replacement})])
    _, added = model._can_record_outputs["output"]
    assert (added.index, added.layer_name, added.class_name) == (2, "x.y", None)


@pytest.mark.parametrize("recorded", [Original, (nn.Linear, Original)])
def test_a_subclass_of_the_recorded_class_is_not_recorded_twice(recorded):
    model = holder(OutputRecorder(recorded))
    adopt_recorders(model, [PatchMapping.of({"Original": SubReplacement})])
    assert targets(model) == [recorded]


def test_one_replacement_of_two_recorded_classes_is_recorded_once():
    model = holder([OutputRecorder(Original), OutputRecorder(nn.Linear)])
    adopt_recorders(model, [PatchMapping.of({"Original|Linear": Replacement})])
    assert targets(model) == [Original, nn.Linear, Replacement]


def test_the_innermost_mapping_decides_what_is_recorded():
    model = holder(Original)
    inner, outer = ({"Original": Replacement}, {"Original": nn.Linear})
    adopt_recorders(model, [PatchMapping.of(inner), PatchMapping.of(outer)])
    assert targets(model) == [Original, Replacement]


@pytest.mark.parametrize("recorders", [None, (), "output", 3])
def test_a_module_without_recorders_is_left_alone(recorders):
    model = type("Holder", (nn.Module,), {"_can_record_outputs": recorders})()
    adopt_recorders(model, [PatchMapping.of({"Original": Replacement})])
    assert "_can_record_outputs" not in vars(model)
