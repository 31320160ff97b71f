"""The status says what is registered, by whom, what is open and what was left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from transformers import LlamaModel, monkey_patching
from transformers.models.llama import modeling_llama

import patchlab
from patchlab.apply.construct import open_frame_count
from patchlab.mapping.registry import OTHERS
from tests.toys import OtherMLP, PlainMLP, SubMLP, llama_config


@pytest.fixture
def cleared():
    yield
    monkey_patching.clear_patch_mapping()
    patchlab.clear_patch_mapping()


def test_a_clean_process_has_a_clean_status():
    status = patchlab.status()
    assert status.is_clean
    assert status.ok
    assert (status.entries, status.leaks, status.open_scopes) == ((), (), 0)
    assert (status.hooked, status.process) == (False, os.getpid())
    assert "nothing registered · nothing left behind" in status.to_text()


@pytest.mark.usefixtures("cleared")
def test_entries_are_in_order_and_know_who_registered_them():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    monkey_patching.register_patch_mapping({"BertLayer": PlainMLP})
    patchlab.register_patch_mapping({"A": OtherMLP})
    status = patchlab.status()
    assert [(e.key, e.is_ours) for e in status.entries] == [
        ("LlamaMLP", True),
        ("BertLayer", False),
        ("A", True),
    ]
    assert status.entries[1].by == OTHERS
    assert status.hooked
    assert not status.is_clean
    assert [(f.code, f.severity, f.key) for f in status.findings] == [
        ("PL402", "info", "BertLayer")
    ]
    assert status.ok


@pytest.mark.usefixtures("cleared")
def test_an_entry_of_others_that_can_never_match_is_a_warning():
    monkey_patching.register_patch_mapping({"*Attention": PlainMLP})
    (finding,) = patchlab.status().findings
    assert (finding.code, finding.severity) == ("PL402", "warning")
    assert "regular expression" in finding.message
    assert "never matches" in patchlab.status().to_text()


@pytest.mark.usefixtures("cleared")
def test_repairing_keeps_what_is_registered():
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    monkey_patching.register_patch_mapping({"BertLayer": PlainMLP})
    assert list(patchlab.status().repair().entries) == list(patchlab.status().entries)
    assert list(patchlab.get_patch_mapping()) == ["LlamaMLP", "BertLayer"]


def test_open_scopes_are_counted_and_hook_the_loading():
    with patchlab.patched({"LlamaMLP": SubMLP}), patchlab.patched({}):
        status = patchlab.status()
        assert (status.open_scopes, status.hooked, status.is_clean) == (2, True, False)
        assert "2 open scopes" in status.to_text()
    assert patchlab.status().is_clean


def test_what_a_preview_builds_is_no_open_scope():
    """The laboratory previews in a thread of its own while the user asks for the status."""
    seen = []

    class Asking(SubMLP):
        def __init__(self, *args, **kwargs):
            seen.append((patchlab.status().open_scopes, open_frame_count()))
            super().__init__(*args, **kwargs)

    patchlab.preview(llama_config(), {"LlamaMLP": Asking})
    with patchlab.patched({"LlamaMLP": Asking}):
        LlamaModel(llama_config())

    assert seen[0] == (0, 1)
    assert seen[-1] == (1, 1)


@pytest.mark.leaks
def test_a_leak_is_an_error_with_the_way_out():
    original = modeling_llama.LlamaMLP
    modeling_llama.LlamaMLP = SubMLP
    try:
        status = patchlab.status()
        (finding,) = status.findings
        assert (finding.code, finding.severity, finding.subject) == ("PL401", "error", "LlamaMLP")
        assert "status().repair()" in finding.message
        assert "tests.toys.SubMLP" in finding.message
        assert (status.ok, status.is_clean) == (False, False)
        assert "1 left behind" in status.to_text()
        assert "PL401" in status.to_html()
    finally:
        modeling_llama.LlamaMLP = original
    # A status is of its moment.
    assert len(status.leaks) == 1
    assert patchlab.status().is_clean


def test_a_status_does_not_change_the_process():
    """Nor does it import modeling code: what is not loaded cannot have leaked."""
    program = (
        "import sys, patchlab; before = set(sys.modules); s = patchlab.status();"
        "print(s.is_clean, [m for m in set(sys.modules) - before if '.models.' in m"
        " and 'modeling_' in m and '.auto' not in m])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "True []"
