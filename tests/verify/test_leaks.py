"""What a patch left behind in transformers is found, and put back.

Most leaks here are made by transformers' own `apply_patches`. Their tests are marked `leaks`; that
they have mended everything in the end is asserted by the fixture `nothing_left_behind`.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import transformers
from torch import nn
from transformers import monkey_patching
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import patchlab
from patchlab.errors import RestoreError
from patchlab.verify.leaks import Leak, find_leaks, mend
from tests.toys import PlainMLP, RefusingMLP, SubAttention, SubMLP, count, llama_config, tokens

LlamaMLP = modeling_llama.LlamaMLP


@pytest.fixture
def cleared():
    yield
    monkey_patching.clear_patch_mapping()
    patchlab.status().repair()


def leave_behind(mapping):
    """What happens in transformers when the block of a patch ends in an error."""
    monkey_patching.register_patch_mapping(mapping)
    with pytest.raises(RuntimeError, match="on purpose"), monkey_patching.apply_patches():
        raise RuntimeError("on purpose")
    monkey_patching.clear_patch_mapping()


def names(leaks) -> set[str]:
    return {f"{leak.python_module}.{leak.name}" for leak in leaks}


def test_a_process_without_leaks_says_so():
    """With models of several kinds built, patched and unpatched, and lazy names asked for."""
    with patchlab.patched({"LlamaMLP": SubMLP}):
        transformers.LlamaModel(llama_config())
    assert transformers.LlamaForCausalLM
    assert find_leaks() == ()


def test_names_of_other_packages_in_transformers_are_no_leaks(monkeypatch):
    monkeypatch.setattr(modeling_llama, "Linear", nn.Linear, raising=False)
    monkeypatch.setattr(modeling_llama, "MyOwnLayer", PlainMLP, raising=False)
    monkeypatch.setattr(modeling_llama, "Renamed", LlamaMLP, raising=False)
    assert find_leaks() == ()


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
def test_an_error_in_a_constructor_under_transformers_own_patch_is_found_and_mended():
    monkey_patching.register_patch_mapping({"LlamaMLP": RefusingMLP})
    with pytest.raises(ValueError, match="refused"):
        transformers.AutoModel.from_config(llama_config())
    monkey_patching.clear_patch_mapping()
    with pytest.raises(ValueError, match="refused"):
        transformers.LlamaModel(llama_config())
    assert "transformers.models.llama.modeling_llama.LlamaMLP" in names(find_leaks())
    assert patchlab.status().repair().is_clean
    assert modeling_llama.LlamaMLP is LlamaMLP
    model = transformers.LlamaModel(llama_config())
    assert model(tokens()).last_hidden_state.shape == (2, 5, 32)


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
def test_every_python_module_that_has_the_name_is_found_and_mended():
    original = transformers.LlamaModel  # the lazy root has the name now as well

    class Mine(original):
        pass

    leave_behind({"LlamaModel": Mine})
    found = names(find_leaks())
    assert "transformers.LlamaModel" in found
    assert "transformers.models.llama.modeling_llama.LlamaModel" in found
    patchlab.status().repair()
    assert transformers.LlamaModel is modeling_llama.LlamaModel is original


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
def test_what_a_broad_key_swapped_that_is_no_module_class_is_mended():
    """transformers' own patch takes any class whose name fits, output classes included."""
    from transformers import modeling_outputs, modeling_utils

    output = modeling_outputs.CausalLMOutputWithCrossAttentions
    interface = modeling_utils.AttentionInterface
    leave_behind({".*Attention": SubAttention})
    assert modeling_utils.AttentionInterface is SubAttention
    patchlab.status().repair()
    assert modeling_outputs.CausalLMOutputWithCrossAttentions is output
    assert modeling_utils.AttentionInterface is interface
    assert find_leaks() == ()


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
def test_a_class_of_transformers_in_the_place_of_another_is_a_leak():
    leave_behind({"LlamaMLP": modeling_mistral.MistralMLP})
    assert "transformers.models.llama.modeling_llama.LlamaMLP" in names(find_leaks())
    patchlab.status().repair()
    assert modeling_llama.LlamaMLP is LlamaMLP


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
def test_two_threads_that_interleave_under_transformers_own_patch_are_mended():
    monkey_patching.register_patch_mapping({"LlamaMLP": SubMLP})
    entered, leave = threading.Event(), threading.Event()

    def second():
        with monkey_patching.apply_patches():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=second)
    with monkey_patching.apply_patches():
        thread.start()
        entered.wait(10)
    leave.set()
    thread.join()
    monkey_patching.clear_patch_mapping()
    assert modeling_llama.LlamaMLP is SubMLP
    assert not patchlab.status().is_clean
    assert patchlab.status().repair().is_clean
    assert count(transformers.LlamaModel(llama_config()), SubMLP) == 0


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
@pytest.mark.parametrize("replacement", [PlainMLP, modeling_mistral.MistralAttention])
def test_recorders_that_transformers_patched_in_the_class_are_found_and_mended(replacement):
    monkey_patching.register_patch_mapping({"LlamaAttention": replacement})
    recorders = modeling_llama.LlamaPreTrainedModel._can_record_outputs
    before = dict(recorders)
    monkey_patching.patch_output_recorders(transformers.LlamaModel(llama_config()))
    monkey_patching.clear_patch_mapping()
    assert recorders["attentions"] is replacement
    (leak,) = find_leaks()
    assert leak.kind == "recorder"
    assert replacement.__name__ in leak.message
    patchlab.status().repair()
    assert modeling_llama.LlamaPreTrainedModel._can_record_outputs is recorders
    assert recorders == before
    model = transformers.LlamaModel(llama_config(attn_implementation="eager"))
    assert len(model(tokens(), output_attentions=True).attentions) == 2


def test_a_wrapped_constructor_is_found_and_taken_off():
    """Somebody reads `__init__` inside a scope and puts it back after it."""
    with patchlab.patched({"LlamaMLP": SubMLP}):
        found = modeling_llama.LlamaMLP.__init__
    modeling_llama.LlamaMLP.__init__ = found
    (leak,) = find_leaks()
    assert (leak.kind, leak.name) == ("init", "LlamaMLP")
    assert "__init__" in leak.message
    mend(leak)
    mend(leak)
    assert modeling_llama.LlamaMLP.__init__ is not found


def test_a_wrapper_of_an_inherited_constructor_leaves_the_class_without_one():
    cls = transformers.LlamaForSequenceClassification
    assert "__init__" not in vars(cls)
    with patchlab.patched({"LlamaForSequenceClassification": type("Mine", (cls,), {})}):
        found = cls.__init__
    assert "__init__" not in vars(cls)
    cls.__init__ = found
    patchlab.status().repair()
    assert "__init__" not in vars(cls)


def test_an_open_scope_is_no_leak():
    with patchlab.patched({"LlamaMLP": SubMLP, "LlamaAttention": PlainMLP}):
        assert find_leaks() == ()


@pytest.mark.leaks
@pytest.mark.usefixtures("cleared")
def test_what_cannot_be_mended_says_so():
    leak = Leak("name", "transformers.nowhere", "LlamaMLP", "x", sys.modules["transformers.utils"])
    with pytest.raises(RestoreError, match="Restart the kernel"):
        mend(leak)


def run(program: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_a_class_that_nothing_holds_any_more_is_defined_again():
    """In a process where nothing but the name held the original."""
    program = """
        import gc, weakref
        import torch
        import transformers
        from transformers import monkey_patching
        from transformers.models.llama import modeling_llama
        config = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=2, vocab_size=8,
            num_attention_heads=1, intermediate_size=8)
        class Mine(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
        original = weakref.ref(modeling_llama.LlamaMLP)
        monkey_patching.register_patch_mapping({"LlamaMLP": Mine, "LlamaModel": Mine})
        def fail():
            with monkey_patching.apply_patches():
                raise RuntimeError
        try:
            fail()
        except RuntimeError:
            pass
        monkey_patching.clear_patch_mapping()
        gc.collect()
        print(original() is None)
        import patchlab
        print(len(patchlab.status().leaks) >= 3, patchlab.status().repair().is_clean)
        print(modeling_llama.LlamaMLP.__module__)
        print(transformers.LlamaModel is modeling_llama.LlamaModel)
        model = transformers.LlamaForCausalLM(config)
        print(model(torch.tensor([[1, 2]])).logits.shape[1])
        with patchlab.patched({"LlamaMLP": Mine}) as report:
            transformers.LlamaModel(config)
        print(report.counts["LlamaMLP"])
    """
    assert run(program) == [
        "True",
        "True",
        "True",
        "transformers.models.llama.modeling_llama",
        "True",
        "2",
        "2",
    ]


@pytest.mark.leaks
@pytest.mark.parametrize("how", ["a function", "nothing"])
def test_a_name_that_is_bound_to_no_class_is_a_leak(how):
    if how == "nothing":
        del modeling_llama.LlamaMLP
    else:
        modeling_llama.LlamaMLP = lambda config: LlamaMLP(config)
    try:
        (leak,) = patchlab.status().leaks
        said = "is gone" if how == "nothing" else "bound to a function"
        assert said in leak.message
        assert patchlab.status().repair().is_clean
        assert modeling_llama.LlamaMLP is LlamaMLP
    finally:
        modeling_llama.LlamaMLP = LlamaMLP


def test_package_that_a_user_holds_from_before_is_mended_with_the_one_of_now():
    """`import transformers` first and a submodule after it: there may be two lazy roots by then."""
    program = """
        import sys, transformers
        import transformers.models.phi.modeling_phi as phi
        from transformers import monkey_patching
        import patchlab
        own = phi.PhiModel
        Mine = type("Mine", (own,), {"__module__": "__main__"})
        monkey_patching.register_patch_mapping({"PhiModel": Mine})
        try:
            with monkey_patching.apply_patches():
                raise RuntimeError
        except RuntimeError:
            pass
        monkey_patching.clear_patch_mapping()
        roots = transformers, sys.modules["transformers"]
        assert all(root.PhiModel is Mine for root in roots)
        patchlab.status().repair()
        print(*[root.PhiModel is own for root in roots], patchlab.status().is_clean)
    """
    assert run(program) == ["True", "True", "True"]
