"""`%patches` shows and changes what transformers applies, whoever asks."""

from __future__ import annotations

import re

import pytest
from IPython.core.error import UsageError
from transformers import monkey_patching

import patchlab
from patchlab.errors import CatalogError
from patchlab.notebook import patches_line

RULE = "^BertSelfAttention$=MyAttention"


@pytest.fixture(autouse=True)
def empty_registry():
    patchlab.clear_patch_mapping()
    yield
    patchlab.clear_patch_mapping()


def registered():
    return {key: cls.__name__ for key, cls in monkey_patching.get_patch_mapping().items()}


def run(shell, line):
    """Run a line and return the text of what it shows."""
    result = shell.run_cell(line)
    result.raise_error()
    return result.result.to_text()


def test_what_is_registered_is_transformers_registry(shell):
    run(shell, f"%patches register {RULE} BertLayer=MyLayerNorm")

    assert registered() == {"^BertSelfAttention$": "MyAttention", "BertLayer": "MyLayerNorm"}


def test_table_shows_key_class_origin_and_time_in_order(shell):
    monkey_patching.register_patch_mapping({"Other": shell.user_ns["MyLayerNorm"]})
    shown = run(shell, f"%patches register {RULE}")

    lines = shown.splitlines()
    (other,) = [line for line in lines if "Other" in line]
    (mine,) = [line for line in lines if "BertSelfAttention" in line]
    assert "2 rules registered" in shown
    assert lines.index(other) < lines.index(mine)
    assert "not registered through patchlab" in other
    assert re.search(r"MyAttention .*magic .*\d\d:\d\d:\d\d", mine)
    assert run(shell, "%patches") == shown
    assert run(shell, "%patches list") == shown


def test_entry_of_others_that_can_never_match_is_marked(shell):
    monkey_patching.register_patch_mapping({"*Attention": shell.user_ns["MyLayerNorm"]})

    assert re.search(r"\*Attention.*never matches", run(shell, "%patches"))


def test_unregistering_takes_out_the_keys_and_no_others(shell):
    run(shell, "%patches register A=MyAttention B=MyAttention ^C(?=x)D$=MyAttention")

    run(shell, "%patches unregister A ^C(?=x)D$")

    assert registered() == {"B": "MyAttention"}


def test_clear_takes_out_everything(shell):
    run(shell, "%patches register A=MyAttention B=MyAttention")

    assert "0 rules registered" in run(shell, "%patches clear")
    assert registered() == {}


def test_cell_that_defines_and_registers_can_be_run_again(shell):
    cell = f"class Mine(BertSelfAttention): pass\n%patches register {RULE.split('=')[0]}=Mine"
    shell.run_cell(cell).raise_error()
    first = monkey_patching.get_patch_mapping()["^BertSelfAttention$"]
    shell.run_cell(cell).raise_error()

    assert monkey_patching.get_patch_mapping()["^BertSelfAttention$"] is not first


def test_key_that_is_taken_needs_overwrite(shell):
    run(shell, f"%patches register {RULE}")

    result = shell.run_cell("%patches register ^BertSelfAttention$=MyLayerNorm")
    assert isinstance(result.error_in_exec, UsageError)
    assert registered() == {"^BertSelfAttention$": "MyAttention"}

    run(shell, "%patches register ^BertSelfAttention$=MyLayerNorm --overwrite")
    assert registered() == {"^BertSelfAttention$": "MyLayerNorm"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%patches regster A=MyAttention", "Did you mean register"),
        ("%patches nothing", "There are list, register, unregister, clear, status"),
        ("%patches A=MyAttention", "%patches register A=MyAttention"),
        ("%patches register", "needs a rule"),
        ("%patches register A", "not a rule"),
        ("%patches register A=Nope", "there is no 'Nope'"),
        ("%patches register A=MyAttention B=Nope", "there is no 'Nope'"),
        ("%patches unregister", "needs a key"),
        ("%patches unregister A", "not registered"),
        ("%patches clear all", "takes nothing after it"),
        ("%patches --all", "there is no option --all"),
    ],
)
def test_line_that_cannot_be_carried_out_changes_nothing(shell, capsys, line, said):
    run(shell, "%patches register Kept=MyAttention")

    result = shell.run_cell(line)

    assert isinstance(result.error_in_exec, UsageError)
    printed = capsys.readouterr()
    assert said in printed.err + printed.out
    assert registered() == {"Kept": "MyAttention"}


def test_line_is_taken_literally(shell):
    shell.run_cell("HOME = 'expanded'").raise_error()

    run(shell, r"%patches register ^Bert\d{1,2}$HOME{HOME}=MyAttention")

    assert list(registered()) == [r"^Bert\d{1,2}$HOME{HOME}"]


def test_status_shows_entries_and_leaks(shell):
    run(shell, f"%patches register {RULE}")

    assert "^BertSelfAttention$" in run(shell, "%patches status")


def test_key_that_is_taken_is_refused_in_the_words_of_the_line(shell):
    """What it says to do can be typed: options of the line, and no arguments of a call."""
    run(shell, f"%patches register {RULE}")

    with pytest.raises(UsageError) as refused:
        shell.run_cell("%patches register ^BertSelfAttention$=MyLayerNorm").raise_error()

    assert "overwrite=True" not in str(refused.value)
    assert "%patches unregister ^BertSelfAttention$ first" in str(refused.value)
    run(shell, "%patches register ^BertSelfAttention$=MyLayerNorm --overwrite")
    assert registered() == {"^BertSelfAttention$": "MyLayerNorm"}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("BertSelfAtention", "'BertSelfAtention' replaced no module.*'BertSelfAttention'"),
        ("'^BertSelfAtention$'", "replaced no module.*'BertSelfAttention'"),
        ("Linear", "Linear is torch's own"),
    ],
)
def test_key_that_is_the_name_of_no_class_is_told_when_it_is_registered(shell, key, said):
    shown = run(shell, f"%patches register {key}=MyAttention BertLayer=MyLayerNorm")

    assert "2 rules registered" in shown
    assert re.search(f"PL104 .*{said}", shown)
    assert shown.index("BertLayer") < shown.index("PL104")
    assert shown.count("PL104 ") == 1
    # Told when it is registered, and not whenever the table is looked at.
    assert "PL104" not in run(shell, "%patches")


def test_key_of_a_class_that_is_not_loaded_is_no_typo(shell):
    shown = run(shell, "%patches register ZambaAttention=MyAttention 'Zamba.*MLP$'=MyLayerNorm")

    assert "PL104" not in shown


def test_transformers_that_cannot_be_read_keeps_nothing_from_being_registered(shell, monkeypatch):
    def unreadable(*args, **options):
        raise CatalogError("no source")

    monkeypatch.setattr(patches_line, "unknown_key_findings", unreadable)
    assert "1 rule registered" in run(shell, "%patches register NoSuch=MyAttention")
