"""However a scope is left, everything is put back: errors, interrupts, threads, tasks, any order.

That nothing is left is asserted after each test by the fixture `nothing_left_behind`; checked
here is that the fault reaches the user, and that what was open before goes on working.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import pytest
import transformers
from torch import nn
from transformers import conversion_mapping, modeling_utils, monkey_patching
from transformers.models.llama import modeling_llama

import patchlab
from patchlab.apply import construct
from tests.faults import Injected, interrupt_at
from tests.leakguard import changed, process_state
from tests.toys import (
    OtherMLP,
    PlainMLP,
    RefusingMLP,
    SubAttention,
    SubMLP,
    count,
    llama_config,
)


def build(layers: int = 2) -> nn.Module:
    return transformers.LlamaModel(llama_config(num_hidden_layers=layers))


def patchlab_lines(filename: str) -> bool:
    return "/patchlab/" in filename and "/tests/" not in filename


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("how", ["from_config", "by hand"])
def test_an_error_in_a_replacements_constructor_reaches_the_user(monkeypatch, error, how):
    monkeypatch.setattr(RefusingMLP, "refusal", error)
    with pytest.raises(type(error)) as raised, patchlab.patched({"LlamaMLP": RefusingMLP}):
        transformers.AutoModel.from_config(llama_config()) if how == "from_config" else build()
    assert raised.value is error
    assert count(build(), RefusingMLP) == 0


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_an_error_in_the_block_reaches_the_user(error):
    with pytest.raises(type(error)), patchlab.patched({"LlamaMLP": SubMLP}) as report:
        raise error
    assert report.restored


def test_an_error_under_a_registered_patch_leaves_nothing_but_the_entry():
    patchlab.register_patch_mapping({"LlamaMLP": RefusingMLP})
    try:
        with pytest.raises(ValueError, match="refused"):
            transformers.AutoModel.from_config(llama_config())
        assert list(patchlab.get_patch_mapping()) == ["LlamaMLP"]
        assert modeling_llama.LlamaMLP.__name__ == "LlamaMLP"
    finally:
        patchlab.clear_patch_mapping()
    assert count(transformers.AutoModel.from_config(llama_config()), RefusingMLP) == 0


def test_a_closed_generator_restores():
    def models():
        with patchlab.patched({"LlamaMLP": SubMLP}):
            yield build()
            yield build()

    steps = models()
    assert count(next(steps), SubMLP) == 2
    steps.close()
    assert count(build(), SubMLP) == 0


def test_scopes_may_be_left_in_any_order():
    first, second = patchlab.patched({"LlamaMLP": SubMLP}), patchlab.patched({"LlamaMLP": OtherMLP})
    third = patchlab.patched({"LlamaAttention": SubAttention})
    for scope in (first, second, third):
        scope.__enter__()
    second.__exit__(None, None, None)
    model = build()
    assert (count(model, SubMLP), count(model, SubAttention)) == (2, 2)
    first.__exit__(None, None, None)
    model = build()
    assert (count(model, SubMLP), count(model, SubAttention)) == (0, 2)
    third.__exit__(None, None, None)


def test_leaving_twice_does_no_harm():
    scope = patchlab.patched({"LlamaMLP": SubMLP})
    with patchlab.patched({"LlamaAttention": SubAttention}):
        with scope:
            pass
        scope.__exit__(None, None, None)
        assert count(build(), SubAttention) == 2


def test_one_scope_can_be_entered_inside_itself_and_again():
    scope = patchlab.patched({"LlamaMLP": SubMLP})
    with scope as outer:
        with scope as inner:
            build()
        assert inner.restored
        assert not outer.restored
        assert count(build(), SubMLP) == 2
    with scope as again:
        build(1)
    assert (outer.counts, inner.counts, again.counts) == (
        {"LlamaMLP": 2},
        {"LlamaMLP": 2},
        {"LlamaMLP": 1},
    )


def test_a_scope_that_is_never_left_closes_when_it_is_collected():
    scope = patchlab.patched({"LlamaMLP": SubMLP})
    scope.__enter__()
    assert count(build(), SubMLP) == 2
    del scope
    gc.collect()
    assert count(build(), SubMLP) == 0


def interrupted_scope(step: int) -> int:
    """Enter and leave a scope with an interrupt at one line of patchlab; return the lines seen."""
    with interrupt_at(step, patchlab_lines) as seen:
        try:
            with patchlab.patched({"LlamaMLP": SubMLP}, conversions={"llama": []}):
                pass
        except Injected:
            pass
    return seen[0]


# An interrupt of the finalizer itself can only be printed; the next use of a scope finishes its
# work.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_enter_and_exit_restores():
    """Every line that entering and leaving run is interrupted once; of long scans, a sample."""
    interrupted_scope(0)
    lines = interrupted_scope(0)
    assert lines > 50
    before = process_state("transformers.models.llama.")
    # Scans of what is loaded run the same lines thousands of times late in a test run.
    sampled = range(300, max(300, lines - 300), max(1, lines // 300))
    for step in [*range(1, min(300, lines)), *sampled, *range(max(300, lines - 300), lines + 1)]:
        interrupted_scope(step)
        left = changed(before, process_state("transformers.models.llama."))
        assert not left, f"line {step} of {lines}: {left[:3]}"
        assert not construct.open_frames()
    assert count(build(), SubMLP) == 0


def test_the_fault_can_leave_something_behind():
    """Guards the test above, which would pass if nothing were ever interrupted."""
    scope = patchlab.patched({"LlamaMLP": SubMLP})
    before = process_state("transformers.models.llama.")
    scope.__enter__()
    left = changed(before, process_state("transformers.models.llama."))
    scope.__exit__(None, None, None)
    assert any("LlamaMLP.__init__" in line for line in left)
    assert any("hooks" in line for line in left)


def test_what_is_registered_inside_is_gone_afterwards():
    """Also by code that registers behind the user's back, as `fusion_config` does."""
    patchlab.register_patch_mapping({"BertLayer": PlainMLP})
    try:
        with patchlab.patched({"LlamaMLP": SubMLP}):
            monkey_patching.register_patch_mapping({"A": PlainMLP})
            patchlab.register_patch_mapping({"B": PlainMLP})
            monkey_patching.register_patch_mapping({"BertLayer": SubMLP}, overwrite=True)
            conversion_mapping.register_checkpoint_conversion_mapping("llama", [], overwrite=True)
            conversion_mapping.register_checkpoint_conversion_mapping("mine", [])
        assert patchlab.get_patch_mapping() == {"BertLayer": PlainMLP}
        assert patchlab.status().entries[0].is_ours
        assert conversion_mapping.get_checkpoint_conversion_mapping("mine") is None
        with patchlab.patched({"LlamaMLP": SubMLP}):
            patchlab.clear_patch_mapping()
        assert patchlab.get_patch_mapping() == {"BertLayer": PlainMLP}
    finally:
        patchlab.clear_patch_mapping()


def test_what_others_register_outside_stays_when_a_scope_closes():
    """A thread without a scope registers while another thread's scope is open."""
    try:
        with patchlab.patched({"LlamaMLP": SubMLP}):
            thread = threading.Thread(
                target=patchlab.register_patch_mapping, args=({"BertLayer": PlainMLP},)
            )
            thread.start()
            thread.join()
        assert patchlab.get_patch_mapping() == {"BertLayer": PlainMLP}
    finally:
        patchlab.clear_patch_mapping()


def test_overlapping_scopes_restore_what_was_before_the_first():
    left = threading.Event(), threading.Event()
    entered = threading.Event()

    def other():
        with patchlab.patched({"LlamaAttention": SubAttention}):
            monkey_patching.register_patch_mapping({"B": PlainMLP})
            entered.set()
            left[0].wait(10)
        left[1].set()

    thread = threading.Thread(target=other)
    with patchlab.patched({"LlamaMLP": SubMLP}):
        monkey_patching.register_patch_mapping({"A": PlainMLP})
        thread.start()
        entered.wait(10)
    left[0].set()
    left[1].wait(10)
    thread.join()
    assert patchlab.get_patch_mapping() == {}


@pytest.mark.slow
def test_eight_threads_of_two_hundred_scopes_with_errors_leave_nothing():
    wrong: list[str] = []

    def work(seed):
        chance = random.Random(seed)
        for _ in range(200):
            wanted = chance.choice([None, SubMLP, OtherMLP, PlainMLP])
            try:
                if wanted is None:
                    found = [type(modeling_llama.LlamaMLP(CONFIG))]
                    expected = modeling_llama.LlamaMLP
                else:
                    with patchlab.patched({"^LlamaMLP$": wanted}, on_finding="ignore"):
                        found = [type(modeling_llama.LlamaMLP(CONFIG))]
                        expected = wanted
                        if chance.random() < 0.3:
                            raise RuntimeError("on purpose")
            except RuntimeError:
                pass
            if found != [expected]:
                wrong.append(f"{seed}: {found} instead of {expected}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]


CONFIG = llama_config()


def test_tasks_that_interleave_see_only_their_own_scope():
    async def task(replacement):
        for _ in range(10):
            with patchlab.patched({"LlamaMLP": replacement}):
                await asyncio.sleep(0)
                assert type(modeling_llama.LlamaMLP(CONFIG)) is replacement
            await asyncio.sleep(0)
            assert type(modeling_llama.LlamaMLP(CONFIG)) is modeling_llama.LlamaMLP

    async def main():
        await asyncio.gather(*(task(cls) for cls in (SubMLP, OtherMLP, PlainMLP)))

    asyncio.run(main())


def test_a_task_that_outlives_its_scope_builds_originals():
    async def later(gate):
        await gate.wait()
        return count(build(), SubMLP)

    async def main():
        gate = asyncio.Event()
        with patchlab.patched({"LlamaMLP": SubMLP}):
            task = asyncio.ensure_future(later(gate))
            await asyncio.sleep(0)
        gate.set()
        return await task

    assert asyncio.run(main()) == 0


def test_another_patcher_on_top_is_left_alone_and_found():
    """Somebody wraps `__init__` inside a scope, and puts back what they found after it."""
    own = modeling_llama.LlamaMLP.__init__
    with patchlab.patched({"LlamaMLP": SubMLP}):
        found = modeling_llama.LlamaMLP.__init__

        def theirs(self, *args, **kwargs):
            found(self, *args, **kwargs)

        modeling_llama.LlamaMLP.__init__ = theirs
    assert modeling_llama.LlamaMLP.__init__ is theirs
    assert count(build(), SubMLP) == 0
    modeling_llama.LlamaMLP.__init__ = found
    (leak,) = patchlab.status().leaks
    assert (leak.kind, leak.name) == ("init", "LlamaMLP")
    assert patchlab.status().repair().is_clean
    assert modeling_llama.LlamaMLP.__init__ is own


def test_another_hook_on_top_is_left_alone():
    own = modeling_utils.apply_patches
    with patchlab.patched({"LlamaMLP": SubMLP}):
        ours = modeling_utils.apply_patches
        theirs = lambda: ours()  # noqa: E731
        modeling_utils.apply_patches = theirs
    assert modeling_utils.apply_patches is theirs
    modeling_utils.apply_patches = own
