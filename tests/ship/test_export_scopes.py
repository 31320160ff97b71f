"""In a block, what is in force there is exported, and decides there as it did in the block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.conversion_mapping import WeightRenaming

import patchlab
from patchlab.errors import ExportError
from patchlab.mapping.rules import PatchMapping
from patchlab.ship.in_force import in_force
from tests.ship.cells import imported, run
from tests.toys import SubMLP


class Other(SubMLP):
    pass


class Third(SubMLP):
    pass


@pytest.fixture
def registry():
    yield
    patchlab.clear_patch_mapping()


def test_rules_of_the_block_and_of_the_registry_are_exported_and_told(registry, path):
    patchlab.register_patch_mapping({"Qwen2MLP": Other})
    with patchlab.patched({"LlamaMLP": SubMLP}):
        file = patchlab.export_patches(path)

    assert file.keys == ("LlamaMLP", "Qwen2MLP")
    note = "the rules of the block that was open when this was written are in it: LlamaMLP."
    assert file.notes == (note,)
    assert note in file.to_html() or note in file.to_table().footer
    assert list(imported(path).MAPPING.values()) == [SubMLP, Other]


def test_outside_of_a_block_only_the_registry_is_exported(registry, path):
    patchlab.register_patch_mapping({"Qwen2MLP": Other})
    with patchlab.patched({"LlamaMLP": SubMLP}):
        pass
    with patchlab.apply_patches():
        file = patchlab.export_patches(path)

    assert (file.keys, file.notes) == (("Qwen2MLP",), ())


def test_mapping_that_is_given_is_all_that_is_exported(path):
    with patchlab.patched({"LlamaMLP": SubMLP}, conversions={"llama": [WeightRenaming("a", "b")]}):
        file = patchlab.export_patches(path, {"Qwen2MLP": Other})

    assert (file.keys, file.notes) == (("Qwen2MLP",), ())
    assert imported(path).CONVERSIONS == {}


def test_conversions_of_the_block_are_exported(path):
    with patchlab.patched({"LlamaMLP": SubMLP}, conversions={"llama": [WeightRenaming("a", "b")]}):
        patchlab.export_patches(path)

    (conversion,) = imported(path).CONVERSIONS["llama"]
    assert isinstance(conversion, WeightRenaming)


keys = st.sampled_from(
    ["LlamaMLP", "^LlamaMLP$", ".*MLP$", "^Llama", "Qwen2MLP", "^Qwen2", "MLP|A"]
)
mappings = st.dictionaries(keys, st.sampled_from([SubMLP, Other, Third]), max_size=3)
NAMES = ["LlamaMLP", "Qwen2MLP", "LlamaAttention", "GemmaMLP", "Qwen2Attention"]


@given(mappings, mappings, mappings)
def test_one_mapping_decides_as_the_scopes_do_one_inside_the_other(outer, inner, registered):
    with patchlab.patched({}, on_finding="ignore"):
        if registered:
            patchlab.register_patch_mapping(registered)
        with (
            patchlab.patched(outer, on_finding="ignore"),
            patchlab.patched(inner, on_finding="ignore"),
        ):
            found = in_force().mapping

    for name in NAMES:
        decided = [
            rule.replacement
            for rule in (PatchMapping.of(m).find(name) for m in (inner, outer, registered))
            if rule is not None
        ]
        rule = found.find(name)
        assert (rule.replacement if rule else None) is (decided[0] if decided else None), name


def test_nothing_in_force_is_refused_with_what_helps(path):
    with pytest.raises(ExportError, match="no patch is registered, no block is open"):
        patchlab.export_patches(path)


def test_replacement_of_these_tests_is_a_module():
    """Guards the tests above, whose mappings would be refused."""
    assert issubclass(Third, nn.Module)


def test_cell_that_is_patched_exports_its_rules(loaded_shell, path):
    run(
        loaded_shell,
        "class MyMLP(LlamaMLP):\n    def forward(self, x):\n        return x",
        f"%%patched --quiet LlamaMLP=MyMLP\nimport patchlab\n"
        f"file = patchlab.export_patches({str(path)!r})",
    )

    file = loaded_shell.user_ns["file"]

    assert (file.keys, file.names) == (("LlamaMLP",), ("MyMLP",))
    assert "the rules of the block" in file.notes[0]
