"""The file is written whole or not at all, and its keys mean the same to transformers."""

from __future__ import annotations

import os
import sys

import pytest
from torch import nn
from transformers import WeightConverter, monkey_patching
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    WeightRenaming,
)

import patchlab
from patchlab import _upstream
from patchlab.apply.conversions import registered_conversions
from patchlab.errors import ExportError, MappingError
from patchlab.mapping.rules import PatchMapping
from patchlab.model.catalog import load_catalog
from patchlab.ship import writing
from tests.faults import Injected, interrupt_at


class Replacement(nn.Module):
    pass


class Other(nn.Module):
    pass


class Third(nn.Module):
    pass


class Keeping(ConversionOps):
    """An operation that keeps what it is given under another name."""

    def __init__(self, by):
        self.amount = by

    def convert(self, input_dict, *args, **kwargs):
        return input_dict


MAPPING = {"LlamaMLP": Replacement}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "my_patches.py"


@pytest.fixture
def empty_registry():
    patchlab.clear_patch_mapping()
    yield
    patchlab.clear_patch_mapping()


def export(path, mapping=MAPPING, conversions=()):
    return patchlab.export_patches(path, mapping, conversions=dict(conversions))


def run_file(path):
    namespace = {"__name__": "my_patches"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace


# Where it is written


def test_file_of_ours_is_replaced_and_keeps_its_mode(path):
    export(path)
    path.chmod(0o640)

    file = export(path, {"BertLayer": Replacement})

    assert "BertLayer" in path.read_text(encoding="utf-8") == file.text
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_file_of_others_is_left_alone(path):
    path.write_text("important = 1\n")

    with pytest.raises(ExportError, match=r"was not written by export_patches. Give another path"):
        export(path)

    assert path.read_text() == "important = 1\n"


def test_link_is_followed(path, tmp_path):
    export(path)
    link = tmp_path / "link.py"
    link.symlink_to(path)

    export(link, {"BertLayer": Replacement})

    assert link.is_symlink()
    assert "BertLayer" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".", "is a folder. Give the file to write in it"),
        ("patches.txt", "does not end in .py"),
        ("patches", r"Use '.*patches\.py'"),
        ("missing/patches.py", "is not there. Make it first"),
        ("transformers.py", "would stand in the way"),
        ("transformers_patches.py", "taken for a part of transformers"),
        ("json.py", "would stand in the way"),
        ("tests.py", "would stand in the way of the Python module 'tests'"),
    ],
)
def test_path_that_no_patch_file_can_have_is_refused(tmp_path, name, why):
    with pytest.raises(ExportError, match=why):
        export(tmp_path / name)

    assert list(tmp_path.iterdir()) == []


def test_path_of_the_wrong_type_is_refused():
    with pytest.raises(ExportError, match="must be a string or a path, got int"):
        export(3)


def test_folder_that_refuses_a_file_is_told(path, monkeypatch):
    path.parent.chmod(0o500)
    try:
        if os.access(path.parent, os.W_OK):  # root may write anywhere, but not over a folder
            path.parent.chmod(0o700)
            target = path.parent / "folder.py"
            target.mkdir()
            with pytest.raises(ExportError, match="cannot be written"):
                writing.write_whole(target, "x = 1\n")
        else:
            with pytest.raises(ExportError, match="cannot be written"):
                export(path)
    finally:
        path.parent.chmod(0o700)
    assert [found.name for found in path.parent.iterdir()] in ([], ["folder.py"])


def test_interrupt_at_any_line_leaves_the_old_file_or_the_new(path):
    old = export(path).text

    def is_ours(filename):
        return filename == writing.__file__

    with interrupt_at(0, is_ours) as seen:
        new = export(path, {"BertLayer": Replacement}).text
    export(path)
    assert seen[0] > 10
    outcomes = set()
    for step in range(1, seen[0] + 1):
        with pytest.raises(Injected), interrupt_at(step, is_ours):
            export(path, {"BertLayer": Replacement})
        outcomes.add(path.read_text(encoding="utf-8"))
        # The last lines take the file beside away; an interrupt there can leave it.
        left = [found for found in path.parent.iterdir() if found != path]
        assert all(found.name.endswith(".part") for found in left)
        for found in left:
            found.unlink()
        export(path)
    assert outcomes == {old, new}


# What is registered


def test_what_is_registered_is_exported_if_nothing_is_given(path, empty_registry):
    patchlab.register_patch_mapping({"LlamaMLP": Replacement, ".*BertLayer": Other})

    file = patchlab.export_patches(path)

    assert file.keys == ("LlamaMLP", ".*BertLayer")


def test_nothing_to_export_is_an_error(path, empty_registry):
    with pytest.raises(ExportError, match="nothing to export"):
        patchlab.export_patches(path)
    with pytest.raises(MappingError):
        patchlab.export_patches(path, {"*": Replacement})
    assert not path.exists()


@pytest.mark.leaks
def test_registered_conversions_go_along_and_those_of_scopes_do_not(path):
    module = _upstream.conversion_module()
    rename = [WeightRenaming("old_name", "new_name")]
    module.register_checkpoint_conversion_mapping("my_model_type", rename)
    try:
        with patchlab.patched(MAPPING, conversions={"llama": rename}, on_finding="ignore"):
            assert list(registered_conversions()) == ["my_model_type"]
            text = patchlab.export_patches(path, MAPPING).text
    finally:
        _upstream.conversion_cache().pop("my_model_type")
        _upstream.user_conversions().discard("my_model_type")

    assert '"my_model_type": [\n' in text or '"my_model_type": [Weight' in text
    assert '"llama"' not in text
    assert '"my_model_type"' not in export(path).text


# The keys


@pytest.mark.parametrize(
    "keys",
    [
        ["LlamaMLP", "BertLayer", ".*Layer$"],
        [".*Attention", "BertAttention", "Bert"],
        ["(?i)^LLAMA(mlp|attention)$", ".*MLP$"],
        ["^Llama|^Bert", "(?x) ^ Qwen2 # a comment"],
        ["(?<!Self)Attention$", "(L)lama.*", "B.*t(L)ayer"],
    ],
)
def test_keys_mean_to_transformers_alone_what_they_mean_to_patchlab(
    path, keys, monkeypatch, empty_registry
):
    """For every class name of transformers, module or not."""
    classes = [Replacement, Other, Third]
    mapping = dict(zip(keys, classes, strict=False))
    ours = PatchMapping.of(mapping)
    export(path, mapping)
    file = run_file(path)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "patchlab", None)
        file["register"]()
    registry = monkey_patching.get_patch_mapping()
    catalog = load_catalog()
    modules = set(catalog.names)

    for name in [*catalog.names, *catalog.other_names]:
        rule = ours.find(name)
        expected = rule.replacement if rule is not None and name in modules else None
        assert monkey_patching._find_replacement_class(name, registry) is expected, name
    assert len(registry) == len(keys)


def test_transformers_left_to_itself_takes_the_same_keys_otherwise():
    """Guards the test above: that is what the keys are rewritten for."""
    mapping = {"BertLayer": Replacement, ".*Attention": Other}

    assert monkey_patching._find_replacement_class("RemBertLayer", mapping) is Replacement
    assert monkey_patching._find_replacement_class("WrappedFlexAttention", mapping) is Other


def test_register_puts_the_files_classes_in_the_place_of_others(path, empty_registry):
    patchlab.register_patch_mapping({"LlamaMLP": Other})
    export(path)
    file = run_file(path)

    assert file["register"]() is file["register"]() is file["MAPPING"]

    assert patchlab.get_patch_mapping() == {"LlamaMLP": Replacement}


# Conversions


def test_conversions_are_written_as_the_calls_that_made_them(path):
    own = [
        WeightConverter(
            source_patterns=["experts.*.w1.weight", "experts.*.w3.weight"],
            target_patterns="experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(["a", "b"], ["c"], [Concatenate()], force_cpu=True),
        WeightRenaming(r"^model\.(.+)\.old", r"model.\1.new"),
        PrefixChange(prefix_to_remove="model"),
    ]
    export(path, conversions={"my_type": own})

    again = run_file(path)["CONVERSIONS"]["my_type"]

    assert [type(item) for item in again] == [type(item) for item in own]
    for mine, made in zip(own, again, strict=True):
        assert _upstream.written_patterns(mine) == _upstream.written_patterns(made)
        assert (mine.source_patterns, mine.target_patterns) == (
            made.source_patterns,
            made.target_patterns,
        )
    assert [vars(op) for op in again[0].operations] == [vars(op) for op in own[0].operations]
    assert again[1].force_cpu
    assert again[3].prefix_to_remove == "model"


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (Keeping(by=2), r"Keeping does not keep its argument 'by'. Set self.by"),
        (patchlab.concatenate_by_config(lambda config: [1, 2]), "another process|lambda"),
    ],
)
def test_conversion_that_cannot_be_made_again_is_refused(path, operation, why):
    with pytest.raises(ExportError, match=why) as error:
        export(path, conversions={"llama": [WeightConverter(["a", "b"], ["c"], [operation])]})

    assert "conversion 0 of 'llama'" in str(error.value)
    assert not path.exists()


# What is returned


def test_result_shows_the_file_as_text_and_as_escaped_html(path):
    file = export(path, {"(?<=Llama)MLP": Replacement})

    bundle = file._repr_mimebundle_()
    lines = len(file.text.splitlines())
    assert bundle["text/plain"] == f"my_patches.py: 1 rule · {lines} lines\n\n{file.text}"
    assert "<pre>" in bundle["text/html"]
    assert "(?&lt;=Llama)MLP" in bundle["text/html"]
    assert "(?<=" not in bundle["text/html"]
    assert repr(file).startswith("<PatchFile: my_patches.py: 1 rule")
    assert file.path == path


def test_findings_stand_in_the_header_and_none_are_said_to_be_none(path):
    file = export(path, {"^Bert.*Attention$": Replacement, "NoSuchThing": Other})

    header = file.text.partition("\nfrom ")[0].replace("\n#  ", "")
    assert {finding.code for finding in file.findings} == {"PL101", "PL104"}
    assert not file.ok
    for finding in file.findings:
        assert f"# - {finding.severity} {finding}" in header
    assert "# Findings when it was written: none.\n" in export(path).text
