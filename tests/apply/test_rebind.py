"""`apply_patches(rebind=True)`: names lead to the replacements in a block, and back after it.

That every name of transformers is what it was is asserted after each test by the fixture
`nothing_left_behind`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import types

import pytest
import transformers
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import patchlab
from patchlab.apply.rebind import rebound
from patchlab.mapping.rules import PatchMapping
from tests.faults import Injected, interrupt_at
from tests.leakguard import changed, process_state
from tests.toys import OtherMLP, PlainMLP, SubMLP, count, llama_config

LlamaMLP = modeling_llama.LlamaMLP


@pytest.fixture
def registered(request):
    """Register what the test is parametrized with, `LlamaMLP` by default; clear afterwards."""
    patchlab.register_patch_mapping(getattr(request, "param", {"LlamaMLP": SubMLP}))
    yield
    patchlab.clear_patch_mapping()


@pytest.fixture
def toy():
    """A Python module of transformers that nobody else knows."""
    module = types.ModuleType("transformers.toy_names")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.usefixtures("registered")
def test_names_lead_to_the_replacement_inside_and_to_the_original_after():
    with patchlab.apply_patches(rebind=True) as report:
        assert modeling_llama.LlamaMLP is SubMLP
        model = transformers.LlamaModel(llama_config())
    assert modeling_llama.LlamaMLP is LlamaMLP
    assert count(model, SubMLP) == 2
    assert report.restored


@pytest.mark.usefixtures("registered")
def test_without_rebind_names_stay():
    """Guards the tests of this file: it is this option that binds."""
    with patchlab.apply_patches():
        assert modeling_llama.LlamaMLP is LlamaMLP


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_an_error_in_the_block_puts_names_back(error):
    with pytest.raises(type(error)), patchlab.apply_patches(rebind=True):
        raise error
    assert modeling_llama.LlamaMLP is LlamaMLP


@pytest.mark.usefixtures("registered")
def test_a_closed_generator_puts_names_back():
    def steps():
        with patchlab.apply_patches(rebind=True):
            yield modeling_llama.LlamaMLP

    running = steps()
    assert next(running) is SubMLP
    running.close()
    assert modeling_llama.LlamaMLP is LlamaMLP


@pytest.mark.usefixtures("registered")
def test_a_block_that_is_never_left_puts_names_back_when_it_is_collected():
    scope = patchlab.apply_patches(rebind=True)
    scope.__enter__()
    assert modeling_llama.LlamaMLP is SubMLP
    del scope
    gc.collect()
    assert modeling_llama.LlamaMLP is LlamaMLP


@pytest.mark.usefixtures("registered")
def test_the_decorator_binds_names_for_each_call():
    @patchlab.apply_patches(rebind=True)
    def seen():
        return modeling_llama.LlamaMLP

    assert [seen(), modeling_llama.LlamaMLP, seen()] == [SubMLP, LlamaMLP, SubMLP]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0)])
def test_blocks_may_be_left_in_any_order(order):
    classes = [SubMLP, OtherMLP, PlainMLP]
    blocks = [rebound(PatchMapping.of({"LlamaMLP": cls})) for cls in classes]
    left = list(classes)
    for block in blocks:
        block.__enter__()
    for i in order:
        assert modeling_llama.LlamaMLP is left[-1]
        blocks[i].__exit__(None, None, None)
        left.remove(classes[i])
    assert modeling_llama.LlamaMLP is LlamaMLP


def test_threads_that_overlap_leave_every_name_as_it_was():
    """The interleaving that leaves transformers' own patch in place for good."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with rebound(PatchMapping.of({"LlamaMLP": OtherMLP})):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        thread.start()
        entered.wait(10)
        assert modeling_llama.LlamaMLP is OtherMLP
    assert modeling_llama.LlamaMLP is OtherMLP
    leave.set()
    thread.join()
    assert modeling_llama.LlamaMLP is LlamaMLP


def test_what_a_third_party_bound_inside_stays():
    class Theirs(LlamaMLP):
        pass

    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        modeling_llama.LlamaMLP = Theirs
    assert modeling_llama.LlamaMLP is Theirs
    modeling_llama.LlamaMLP = LlamaMLP


def test_a_name_that_a_third_party_removed_stays_removed(toy):
    toy.LlamaMLP = LlamaMLP
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        del toy.LlamaMLP
    assert not hasattr(toy, "LlamaMLP")


def test_a_module_that_copied_the_name_inside_is_put_back_too(toy):
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        toy.LlamaMLP = modeling_llama.LlamaMLP
        assert toy.LlamaMLP is SubMLP
    assert toy.LlamaMLP is LlamaMLP


def test_a_module_that_copied_the_name_under_another_one_is_put_back_too(toy):
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        toy.Feed = modeling_llama.LlamaMLP
    assert toy.Feed is LlamaMLP


def test_a_module_that_imports_the_replacement_by_its_own_path_keeps_it(toy):
    """Guards the two tests above: what was there before the block is not put back."""
    toy.Mine = SubMLP
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        pass
    assert toy.Mine is SubMLP


def test_a_module_dropped_inside_the_block_does_no_harm(toy):
    toy.LlamaMLP = LlamaMLP
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        assert toy.LlamaMLP is SubMLP
        sys.modules.pop(toy.__name__)
    assert toy.LlamaMLP is LlamaMLP
    sys.modules[toy.__name__] = toy


def test_names_bound_to_torch_classes_follow_their_name(toy):
    class Mine(nn.Linear):
        pass

    toy.Linear = nn.Linear
    with rebound(PatchMapping.of({"Linear": Mine})):
        assert toy.Linear is Mine
    assert toy.Linear is nn.Linear


def test_a_pattern_binds_the_names_it_fits_and_an_exact_name_comes_first(toy):
    toy.AlphaAttention = toy.BetaAttention = toy.GammaOther = nn.Module
    rules = {".*Attention": PlainMLP, "BetaAttention": OtherMLP}
    with rebound(PatchMapping.of(rules)):
        bound = (toy.AlphaAttention, toy.BetaAttention, toy.GammaOther)
    assert bound == (PlainMLP, OtherMLP, nn.Module)
    assert toy.AlphaAttention is toy.BetaAttention is nn.Module


def test_a_class_bound_under_an_alias_is_bound_by_its_own_name(toy):
    toy.Feed = LlamaMLP
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        assert toy.Feed is SubMLP
    assert toy.Feed is LlamaMLP


def test_names_that_are_no_module_classes_stay(toy):
    toy.LlamaMLP, toy.MyMLP = "text", dict
    with rebound(PatchMapping.of({".*MLP$": SubMLP})):
        assert (toy.LlamaMLP, toy.MyMLP) == ("text", dict)


def test_names_outside_transformers_stay():
    other = types.ModuleType("transformersish")
    other.LlamaMLP = LlamaMLP
    sys.modules[other.__name__] = other
    try:
        with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
            assert other.LlamaMLP is LlamaMLP
    finally:
        del sys.modules[other.__name__]


def test_two_rules_that_exchange_two_classes_do_so():
    mistral = modeling_mistral.MistralMLP
    rules = {"LlamaMLP": mistral, "MistralMLP": LlamaMLP}
    with rebound(PatchMapping.of(rules)):
        assert modeling_llama.LlamaMLP is mistral
        assert modeling_mistral.MistralMLP is LlamaMLP
    assert modeling_llama.LlamaMLP is LlamaMLP
    assert modeling_mistral.MistralMLP is mistral


def test_a_file_first_imported_inside_has_its_own_names_afterwards():
    program = """
        import sys
        import patchlab
        from torch import nn
        from transformers.models.llama import modeling_llama
        class My(modeling_llama.LlamaRMSNorm): ...
        name = "transformers.models.diffllama.modeling_diffllama"
        assert name not in sys.modules
        patchlab.register_patch_mapping({"LlamaRMSNorm": My, "BertModel": My})
        with patchlab.apply_patches(rebind=True):
            from transformers.models.bert import modeling_bert
            from transformers import BertModel
            import importlib
            importlib.import_module(name)
            modeling_bert.LlamaRMSNorm = modeling_llama.LlamaRMSNorm
        print(modeling_llama.LlamaRMSNorm.__module__.split(".")[0],
              modeling_bert.LlamaRMSNorm.__module__.split(".")[0],
              modeling_bert.BertModel.__name__, len(patchlab.status().leaks))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["transformers", "transformers", "BertModel", "0"], ran.stderr


def test_an_open_block_is_no_leak():
    with rebound(PatchMapping.of({"LlamaMLP": SubMLP})):
        assert not patchlab.status().leaks


def rebind_lines(filename: str) -> bool:
    return filename.endswith("/patchlab/apply/rebind.py")


def test_an_interrupt_at_any_line_puts_names_back():
    mapping = PatchMapping.of({"LlamaMLP": SubMLP})
    # Few lines matter; the long scan over all loaded modules is one of them, many times over.
    with interrupt_at(0, rebind_lines) as seen, rebound(mapping):
        pass
    before = process_state("transformers.models.llama.")
    first, last = range(1, 60), range(seen[0] - 60, seen[0] + 1)
    for step in [*first, *range(60, seen[0] - 60, max(1, seen[0] // 60)), *last]:
        block = rebound(mapping)
        try:
            with interrupt_at(step, rebind_lines):
                try:
                    block.__enter__()
                finally:
                    block.__exit__(None, None, None)
        except Injected:
            block.__exit__(None, None, None)
        assert not changed(before, process_state("transformers.models.llama.")), (
            f"line {step} of {seen[0]}"
        )
