"""Any text behind a magic: it is carried out, or refused as usage; the next cell runs as ever."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

import patchlab
from patchlab.apply import construct
from patchlab.errors import PatchlabError, PatchlabWarning
from patchlab.notebook.magic_line import parse_line, split_words
from patchlab.notebook.patches_line import run_command

PIECES = [
    *("BertSelfAttention", "MyAttention", "MyLayerNorm", "MyAttention.forward", "torch.nn.Linear"),
    *("=", "==", " ", "  ", "'", '"', "^", "$", "(", ".*", "[[", "\\", "{config}", "$config"),
    *("!", "?", "%", "%%patched", "#", ";", "--", "---", "-", "--model", "--model=config", "--map"),
    *("--convert", "--strict", "--quiet", "--diff", "--help", "-h", "--overwrite", "register"),
    *("unregister", "clear", "list", "status", "torch.nn", "__builtins__", "None", "0", "<b>"),
    *("é", "\u2028", "\x00", "\x85", "\t"),
]
lines = st.lists(st.sampled_from(PIECES), max_size=7).map("".join) | st.text(
    st.characters(exclude_characters="\r\n"), max_size=25
)
# Where a cell has its line breaks is Python's to say, and IPython's.
one_line = lines.filter(lambda line: len(f"{line}.".splitlines()) == 1)
quiet = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `%patches export` writes a file.


@settings(max_examples=300, deadline=None)
@given(lines)
def test_line_is_read_or_refused_as_usage(line):
    for options in ({}, {"valued": ("--map",), "flags": ("--overwrite",), "words": True}):
        with contextlib.suppress(UsageError):
            read = parse_line(line, **options)
            assert all(key and name for key, name in read.rules)
    with contextlib.suppress(UsageError):
        assert all("\n" not in word for word in split_words(line))


@quiet
@given(lines)
def test_command_is_carried_out_or_refused_as_usage(shell, line):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatchlabWarning)
        with contextlib.suppress(UsageError):
            run_command(line, shell.user_ns)
    for key, replacement in patchlab.get_patch_mapping().items():
        assert isinstance(key, str)
        assert isinstance(replacement, type)
    patchlab.clear_patch_mapping()


@quiet
@given(st.sampled_from(["%%patched", "%%patched ", "%patches ", "%patches"]), one_line)
def test_cell_ends_in_a_result_or_in_a_refusal_and_the_next_one_is_itself(shell, magic, line):
    before = dict(shell.user_ns)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        ran = shell.run_cell(f"{magic}{line}\nanswer = 42")
        patchlab.clear_patch_mapping()
        after = shell.run_cell("BertModel(config); answer_again = 7")

    error = ran.error_before_exec or ran.error_in_exec
    assert error is None or isinstance(error, (UsageError, PatchlabError, SyntaxError)), repr(error)
    assert after.success
    assert not construct.open_frame_count()
    assert shell.user_ns["config"] is before["config"]


def test_error_from_inside_would_be_seen(shell):
    """Guards the test above."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ran = shell.run_cell("%%patched BertSelfAttention=MyAttention\nraise KeyError('x')")

    assert isinstance(ran.error_in_exec, KeyError)


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize("magic", ["%%patched BertSelfAttention=MyAttention", "%patches register"])
def test_help_lists_the_options_with_an_example(shell, capsys, magic, word):
    assert shell.run_cell(f"{magic} {word}").success

    shown = capsys.readouterr().out
    assert "key=Class" in shown
    assert "--overwrite" in shown or "--strict" in shown
    assert "::" not in shown
    assert not patchlab.get_patch_mapping()


def test_cell_below_a_question_for_help_is_not_run(shell, capsys):
    ran = shell.run_cell("%%patched --help\nanswer = 42")

    assert isinstance(ran.error_in_exec, UsageError)
    assert "--strict" in str(ran.error_in_exec)
    assert "answer" not in shell.user_ns
