"""A scope replaces what its rules say in models built inside, and puts everything back."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import transformers
from torch import nn
from transformers import modeling_utils, monkey_patching
from transformers.models.llama import modeling_llama

import patchlab
from patchlab.errors import ApplyError
from tests.toys import (
    OtherMLP,
    PlainMLP,
    SubAttention,
    SubMLP,
    classes_in,
    count,
    llama_config,
    llava_config,
    tokens,
)

LlamaMLP = modeling_llama.LlamaMLP


def test_models_built_inside_are_patched_and_models_outside_are_not():
    with patchlab.patched({"LlamaMLP": SubMLP}):
        inside = transformers.LlamaModel(llama_config())
    outside = transformers.LlamaModel(llama_config())
    assert (count(inside, SubMLP), count(inside, LlamaMLP)) == (2, 0)
    assert (count(outside, SubMLP), count(outside, LlamaMLP)) == (0, 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda c: transformers.LlamaModel(c),
        lambda c: transformers.LlamaModel._from_config(c),
        lambda c: transformers.AutoModel.from_config(c),
        lambda c: transformers.AutoModelForCausalLM.from_config(c),
    ],
)
def test_every_way_to_build_is_reached(build):
    with patchlab.patched({"LlamaMLP": SubMLP}) as report:
        model = build(llama_config())
    assert count(model, SubMLP) == 2
    assert report.counts == {"LlamaMLP": 2}
    assert report.models[0].replacements[0].fqns[0].endswith("layers.0.mlp")


def test_from_pretrained_is_reached_and_gives_the_same_outputs(tmp_path):
    plain = transformers.LlamaForCausalLM(llama_config()).eval()
    plain.save_pretrained(tmp_path)
    with patchlab.patched({"LlamaMLP": SubMLP}) as report:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert report.counts == {"LlamaMLP": 2}
    assert torch.allclose(model(tokens()).logits, plain(tokens()).logits, atol=1e-6)


def test_the_top_level_class_is_replaced_too():
    """transformers looks the class of an AutoModel up before its patch, and misses it."""

    class MyLlama(transformers.LlamaForCausalLM):
        pass

    with patchlab.patched({"LlamaForCausalLM": MyLlama}) as report:
        model = transformers.AutoModelForCausalLM.from_config(llama_config())
    assert type(model) is MyLlama
    assert report.models[0].replacements[0].fqns == ("",)
    assert modeling_llama.LlamaForCausalLM is transformers.LlamaForCausalLM


def test_classes_held_in_a_dispatch_dict_are_replaced():
    """Rebinding names does not reach the dict that falcon builds its layers from."""
    from transformers.models.falcon.modeling_falcon import FalconAttention

    class MyAttention(FalconAttention):
        pass

    config = transformers.FalconConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    with patchlab.patched({"FalconAttention": MyAttention}):
        model = transformers.FalconModel(config)
    assert count(model, MyAttention) == 2


def test_nested_sub_models_are_reached_once():
    with patchlab.patched({"LlamaMLP": SubMLP}) as report:
        model = transformers.AutoModelForImageTextToText.from_config(llava_config())
    assert count(model, SubMLP) == 2
    assert [m.class_name for m in report.models] == ["LlavaForConditionalGeneration"]
    assert report.counts == {"LlamaMLP": 2}


def test_a_wrapper_that_builds_the_original_by_name_gets_the_original():
    class Wrapper(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.inner = modeling_llama.LlamaMLP(config)

        def forward(self, hidden_states):
            return self.inner(hidden_states)

    with patchlab.patched({"LlamaMLP": Wrapper}):
        model = transformers.LlamaModel(llama_config())
    assert (count(model, Wrapper), count(model, LlamaMLP)) == (2, 2)
    assert torch.isfinite(model(tokens()).last_hidden_state).all()


def test_isinstance_against_the_original_keeps_its_meaning():
    """`_init_weights` of most models asks for its own classes; the name must not lead elsewhere."""
    with patchlab.patched({"LlamaMLP": PlainMLP}):
        assert modeling_llama.LlamaMLP is LlamaMLP
        model = transformers.LlamaModel(llama_config())
    assert not any(isinstance(m, LlamaMLP) for m in model.modules())


def test_only_the_class_itself_is_matched_and_not_its_subclasses():
    class Mine(LlamaMLP):
        pass

    with patchlab.patched({"LlamaMLP": SubMLP}):
        assert type(Mine(llama_config())) is Mine
        assert type(LlamaMLP(llama_config())) is SubMLP


def test_remote_code_and_other_packages_are_left_alone():
    """transformers patches whatever Python module's name starts with "transformers"."""
    for module in ("transformers_modules.x", "transformersish", "__main__"):
        cls = type("LlamaMLP", (nn.Module,), {"__module__": module})
        with patchlab.patched({"LlamaMLP": SubMLP}):
            assert type(cls()) is cls


def test_scopes_nest_and_the_inner_one_decides():
    with patchlab.patched({"LlamaMLP": SubMLP}):
        with patchlab.patched({"LlamaMLP": OtherMLP, "LlamaAttention": SubAttention}):
            inner = transformers.LlamaModel(llama_config())
        outer = transformers.LlamaModel(llama_config())
    assert (count(inner, OtherMLP), count(inner, SubAttention)) == (2, 2)
    assert (count(outer, SubMLP), count(outer, SubAttention)) == (2, 0)


def test_a_scope_comes_before_what_is_registered():
    patchlab.register_patch_mapping({"LlamaMLP": OtherMLP, "LlamaAttention": SubAttention})
    try:
        with patchlab.patched({"LlamaMLP": SubMLP}):
            model = transformers.AutoModel.from_config(llama_config())
        assert (count(model, SubMLP), count(model, SubAttention)) == (2, 2)
    finally:
        patchlab.clear_patch_mapping()


def test_registered_rules_apply_to_loading_and_to_apply_patches_alone():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    try:
        assert count(transformers.AutoModel.from_config(llama_config()), SubMLP) == 2
        assert count(transformers.LlamaModel(llama_config()), SubMLP) == 0
        with patchlab.apply_patches() as report:
            assert count(transformers.LlamaModel(llama_config()), SubMLP) == 2
        assert report.counts == {"LlamaMLP": 2}
        with patchlab.patched() as report:
            model = transformers.AutoModel.from_config(llama_config())
        assert report.counts == {"LlamaMLP": 2}
        assert count(model, SubMLP) == 2
    finally:
        patchlab.clear_patch_mapping()


def test_a_model_loaded_next_to_it_is_plain_in_any_order():
    with patchlab.patched({"LlamaMLP": SubMLP}):
        teacher = transformers.LlamaModel(llama_config())
    student = transformers.LlamaModel(llama_config())
    with patchlab.patched({"LlamaMLP": SubMLP}):
        again = transformers.LlamaModel(llama_config())
    assert [count(m, SubMLP) for m in (teacher, student, again)] == [2, 0, 2]


def test_a_patched_model_can_be_copied_and_pickled_inside_and_outside():
    with patchlab.patched({"LlamaMLP": SubMLP}):
        model = transformers.LlamaModel(llama_config()).eval()
        inside = pickle.loads(pickle.dumps(model))
        twin = copy.deepcopy(model)
    for other in (inside, twin, pickle.loads(pickle.dumps(model))):
        assert classes_in(other) == classes_in(model)
        assert torch.equal(other(tokens()).last_hidden_state, model(tokens()).last_hidden_state)


def test_a_class_first_imported_inside_the_block_is_patched_on_the_first_run():
    program = """
        import patchlab, sys
        from torch import nn
        class My(nn.Module):
            def __init__(self, config):
                super().__init__()
        assert "transformers.models.llama.modeling_llama" not in sys.modules
        seen = []
        for _ in range(2):
            with patchlab.patched({"LlamaMLP": My}):
                from transformers import LlamaModel, LlamaConfig
                model = LlamaModel(LlamaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8,
                    num_attention_heads=1, intermediate_size=8))
            seen.append(type(model.layers[0].mlp).__name__)
        from transformers.models.llama import modeling_llama
        model = LlamaModel(model.config)
        print(*seen, type(model.layers[0].mlp).__name__, modeling_llama.LlamaMLP.__name__)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["My", "My", "LlamaMLP", "LlamaMLP"], ran.stderr


def test_matching_imports_no_modeling_code():
    """transformers itself imports 521 Python modules under such a key."""
    with patchlab.patched({".*ForCausalLM$": SubMLP}):
        pass
    before = set(sys.modules)
    with patchlab.patched({".*ForCausalLM$": SubMLP, ".*Model": SubMLP}):
        pass
    assert set(sys.modules) == before


@pytest.mark.reloads("transformers.models.nanochat.")
def test_a_reloaded_python_module_is_patched_and_restored():
    import importlib

    name = "transformers.models.nanochat.modeling_nanochat"
    module = importlib.import_module(name)
    with patchlab.patched({"NanoChatMLP": SubMLP}):
        importlib.reload(module)
        assert vars(module.NanoChatMLP)["__init__"].__wrapped__ is not None
    assert not hasattr(vars(module.NanoChatMLP)["__init__"], "__wrapped__")


class SlottedMLP(nn.Module):
    __slots__ = ("extra",)


class NewMLP(nn.Module):
    def __new__(cls, *args):
        return super().__new__(cls)


@pytest.mark.parametrize(
    ("replacement", "reason"), [(SlottedMLP, "__slots__"), (NewMLP, "__new__")]
)
def test_a_replacement_that_cannot_take_the_place_is_refused_at_the_door(replacement, reason):
    with pytest.raises(ApplyError, match=reason), patchlab.patched({"LlamaMLP": replacement}):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("on_finding", ["loud", None, True])
def test_an_unknown_policy_is_refused(on_finding):
    with pytest.raises(ValueError, match="'warn', 'error' and 'ignore'"):
        patchlab.patched({"LlamaMLP": SubMLP}, on_finding=on_finding)


def test_a_decorated_function_runs_in_a_scope_each_time():
    @patchlab.patched({"LlamaMLP": SubMLP})
    def build(layers, *, deeper=False):
        """Build it."""
        if deeper:
            build(1)
        return transformers.LlamaModel(llama_config(num_hidden_layers=layers))

    assert build.__doc__ == "Build it."
    assert count(build(3, deeper=True), SubMLP) == 3
    assert count(transformers.LlamaModel(llama_config()), SubMLP) == 0


def test_a_decorated_coroutine_is_patched_across_its_awaits():
    @patchlab.patched({"LlamaMLP": SubMLP})
    async def build():
        await asyncio.sleep(0)
        return transformers.LlamaModel(llama_config())

    assert count(asyncio.run(build()), SubMLP) == 2


def test_a_decorated_generator_is_patched_and_its_consumer_is_not():
    @patchlab.patched({"LlamaMLP": SubMLP})
    def models():
        try:
            sent = yield transformers.LlamaModel(llama_config())
            yield sent, transformers.LlamaModel(llama_config())
        except KeyError:
            yield "handled"

    steps = models()
    assert count(next(steps), SubMLP) == 2
    assert count(transformers.LlamaModel(llama_config()), SubMLP) == 0
    sent, second = steps.send("sent")
    assert (sent, count(second, SubMLP)) == ("sent", 2)
    assert steps.throw(KeyError()) == "handled"
    steps.close()


def test_a_decorated_asynchronous_generator_is_refused():
    async def models():
        yield 1

    with pytest.raises(ApplyError, match="asynchronous generator"):
        patchlab.patched({"LlamaMLP": SubMLP})(models)


def test_a_decorated_class_is_refused():
    with pytest.raises(ApplyError, match="is a class"):
        patchlab.patched({"LlamaMLP": SubMLP})(dict)


def test_a_worker_thread_sees_the_scope_only_in_a_copied_context():
    def build(into):
        into.append(count(transformers.LlamaModel(llama_config()), SubMLP))

    plain, copied = [], []
    with patchlab.patched({"LlamaMLP": SubMLP}):
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=build, args=(plain,)),
            threading.Thread(target=context.run, args=(build, copied)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (plain, copied) == ([0], [2])
    assert context.run(lambda: count(transformers.LlamaModel(llama_config()), SubMLP)) == 0


def test_a_spawned_process_has_an_empty_registry_and_says_so():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    try:
        program = "import patchlab; s = patchlab.status(); print(len(s.entries), s.is_clean)"
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert ran.stdout.split() == ["0", "True"]
        assert len(patchlab.status().entries) == 1
    finally:
        patchlab.clear_patch_mapping()


def test_upstream_stays_in_charge_of_what_is_registered_through_it_alone():
    monkey_patching.register_patch_mapping({"LlamaMLP": SubMLP})
    try:
        assert modeling_utils.apply_patches is monkey_patching.apply_patches
        assert count(transformers.AutoModel.from_config(llama_config()), SubMLP) == 2
        with patchlab.patched({"LlamaAttention": SubAttention}):
            model = transformers.AutoModel.from_config(llama_config())
        assert (count(model, SubMLP), count(model, SubAttention)) == (2, 2)
    finally:
        monkey_patching.clear_patch_mapping()
