"""The registry is transformers' own, written all or nothing, with provenance."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import modeling_utils, monkey_patching

import patchlab
from patchlab.errors import MappingError, PatchlabError
from patchlab.mapping.registry import OTHERS, registered_by, registered_entries, registered_mapping
from tests.toys import OtherMLP, PlainMLP, SubAttention, SubMLP


@pytest.fixture(autouse=True)
def cleared(nothing_left_behind):
    yield
    patchlab.clear_patch_mapping()


def redefined(name="Again", module="__main__"):
    return type(name, (nn.Module,), {"__module__": module, "__qualname__": name})


def test_both_sides_see_one_store():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    monkey_patching.register_patch_mapping({"LlamaAttention": SubAttention})
    assert patchlab.get_patch_mapping() == monkey_patching.get_patch_mapping()
    assert list(patchlab.get_patch_mapping()) == ["LlamaMLP", "LlamaAttention"]
    monkey_patching.clear_patch_mapping()
    assert patchlab.get_patch_mapping() == {}


@pytest.mark.parametrize("bad", ["not a class", nn.Linear(1, 1), None, dict])
def test_one_bad_replacement_registers_nothing(bad):
    with pytest.raises(TypeError, match="LlamaAttention"):
        patchlab.register_patch_mapping({"LlamaMLP": SubMLP, "LlamaAttention": bad})
    assert patchlab.get_patch_mapping() == {}


def test_one_taken_key_registers_nothing():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    with pytest.raises(ValueError, match=r"'LlamaMLP' already .* overwrite=True"):
        patchlab.register_patch_mapping({"LlamaAttention": SubAttention, "LlamaMLP": OtherMLP})
    assert patchlab.get_patch_mapping() == {"LlamaMLP": SubMLP}
    patchlab.register_patch_mapping({"LlamaMLP": OtherMLP}, overwrite=True)
    assert patchlab.get_patch_mapping() == {"LlamaMLP": OtherMLP}


def test_one_unknown_key_unregisters_nothing():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP, "LlamaAttention": SubAttention})
    with pytest.raises(ValueError, match=r"'LlamaMlp' is not registered.*'LlamaMLP'"):
        patchlab.unregister_patch_mapping(["LlamaAttention", "LlamaMlp"])
    assert list(patchlab.get_patch_mapping()) == ["LlamaMLP", "LlamaAttention"]


def test_a_single_key_may_be_given_as_a_string():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    patchlab.unregister_patch_mapping("LlamaMLP")
    assert patchlab.get_patch_mapping() == {}


@pytest.mark.parametrize("keys", [3, None, [3], [None]])
def test_keys_that_are_no_strings_are_a_type_error(keys):
    with pytest.raises(TypeError, match="key"):
        patchlab.unregister_patch_mapping(keys)


def test_a_class_defined_again_takes_the_place_of_its_older_self():
    """The register cell of a notebook can be run again."""
    old, new = redefined(), redefined()
    patchlab.register_patch_mapping({"LlamaMLP": old})
    patchlab.register_patch_mapping({"LlamaMLP": new})
    assert patchlab.get_patch_mapping()["LlamaMLP"] is new


def test_another_class_of_the_same_name_does_not():
    """Guards the test above: only the same Python module and qualified name is the same class."""
    patchlab.register_patch_mapping({"LlamaMLP": redefined(module="somewhere")})
    with pytest.raises(MappingError, match="already"):
        patchlab.register_patch_mapping({"LlamaMLP": redefined(module="elsewhere")})


def test_each_entry_knows_who_registered_it():
    with registered_by("form"):
        patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    monkey_patching.register_patch_mapping({"LlamaAttention": SubAttention})
    patchlab.register_patch_mapping({"BertLayer": PlainMLP})
    monkey_patching.register_patch_mapping({"BertLayer": OtherMLP}, overwrite=True)
    assert [entry.by for entry in registered_entries()] == ["form", OTHERS, OTHERS]
    assert registered_entries()[0].when is not None


def test_entries_of_others_that_can_never_match_are_told_and_left_out():
    monkey_patching.register_patch_mapping({"*Attention": SubAttention, "LlamaMLP": SubMLP})
    assert [bool(entry.problem) for entry in registered_entries()] == [True, False]
    assert [rule.key for rule in registered_mapping()] == ["LlamaMLP"]


def test_transformers_own_loading_stands_unless_something_is_registered():
    own = monkey_patching.apply_patches
    assert modeling_utils.apply_patches is own
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    assert modeling_utils.apply_patches is not own
    patchlab.unregister_patch_mapping("LlamaMLP")
    assert modeling_utils.apply_patches is own


steps = st.lists(
    st.tuples(
        st.sampled_from(["register", "overwrite", "unregister"]),
        st.lists(st.sampled_from(["A", "B", "C", "*bad", "a.b"]), min_size=1, max_size=3),
    ),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_after_any_step_the_registry_is_the_old_one_or_the_whole_new_one(steps):
    try:
        for what, keys in steps:
            before = patchlab.get_patch_mapping()
            mapping = dict.fromkeys(keys, SubMLP)
            try:
                if what == "unregister":
                    patchlab.unregister_patch_mapping(keys)
                    expected = {k: v for k, v in before.items() if k not in keys}
                else:
                    patchlab.register_patch_mapping(mapping, overwrite=what == "overwrite")
                    expected = before | mapping
            except MappingError:
                expected = before
            assert patchlab.get_patch_mapping() == expected
    finally:
        patchlab.clear_patch_mapping()


def test_two_threads_cannot_both_register_one_key():
    """Of many racing for one key without overwrite exactly one wins, and its class is there."""
    classes = [redefined(f"Class{i}", module=f"m{i}") for i in range(16)]
    barrier, won = threading.Barrier(len(classes)), []

    def race(cls):
        barrier.wait()
        try:
            patchlab.register_patch_mapping({"LlamaMLP": cls})
            won.append(cls)
        except MappingError:
            pass

    threads = [threading.Thread(target=race, args=(cls,)) for cls in classes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert patchlab.get_patch_mapping() == {"LlamaMLP": won[0]}


def test_what_is_returned_is_a_copy():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    patchlab.get_patch_mapping()["BertLayer"] = PlainMLP
    assert patchlab.get_patch_mapping() == {"LlamaMLP": SubMLP}


def test_a_reader_never_sees_half_of_what_is_registered_together():
    """One thread registers and removes them, the other reads all the while."""
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(len(patchlab.get_patch_mapping()))

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader.start()
    try:
        keys = [f"Class{i}" for i in range(1000)]
        for _ in range(40):
            patchlab.register_patch_mapping(dict.fromkeys(keys, SubMLP))
            patchlab.unregister_patch_mapping(keys)
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert seen
    assert set(seen) <= {0, 1000}


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: patchlab.register_patch_mapping(wrong),
        lambda wrong: patchlab.register_patch_mapping({wrong: nn.Linear}),
        lambda wrong: patchlab.unregister_patch_mapping(wrong),
        lambda wrong: patchlab.patched(wrong),
        lambda wrong: patchlab.preview(wrong, wrong),
        lambda wrong: patchlab.check_checkpoint(wrong, wrong),
        lambda wrong: patchlab.compare_outputs(wrong, 3, {}),
    ],
)
def test_a_model_in_the_wrong_place_is_refused_in_a_few_words(call):
    """Arguments that changed places: the message does not hold the whole model."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(500)))
    with pytest.raises(PatchlabError) as refused:
        call(model)
    assert len(str(refused.value)) < 500
