"""patchlab's own errors show the user's lines in a notebook, and everybody else's errors all."""

from __future__ import annotations

import sys
import traceback

import pytest

from patchlab.errors import PatchlabError
from patchlab.notebook.own_errors import without_own_lines

CALLS = {
    "a bad pattern": "patchlab.register_patch_mapping({'Bert(': MyAttention})",
    "a target that is none": "patchlab.lab({'a': 1})",
    "a code that is none": "patchlab.explain('PL9')",
    "a refused block": "with patchlab.patched({'.*Attention': MyAttention}, on_finding='error'): x",
    "a failed check": "patchlab.preview(config, {'.*Attention': MyAttention}).check()",
}


def lines_of(printed):
    """Return the lines that a traceback points at."""
    return [line for line in printed.splitlines() if line.startswith("--")][1:]


@pytest.mark.parametrize("call", CALLS)
def test_error_of_patchlab_points_at_the_cell_alone_and_says_what_is_wrong(shell, capsys, call):
    result = shell.run_cell(f"import patchlab\n\ndef mine():\n    {CALLS[call]}\n\nmine()")
    printed = capsys.readouterr().out

    assert isinstance(result.error_in_exec, PatchlabError)
    assert lines_of(printed) == ["----> 6 mine()", f"----> 4     {CALLS[call]}"]
    assert str(result.error_in_exec).splitlines()[0] in printed
    assert "direct cause" not in printed


def test_debugger_and_verbose_tracebacks_have_every_line(shell, capsys):
    error = shell.run_cell("import patchlab\npatchlab.explain('PL9')").error_in_exec
    short = capsys.readouterr().out
    shell.run_cell("%xmode Verbose")
    shell.run_cell("patchlab.explain('PL9')")
    shell.run_cell("%xmode Context")

    assert "explain.py" not in short
    assert "explain.py" in capsys.readouterr().out
    assert traceback.extract_tb(error.__traceback__)[-1].filename.endswith("explain.py")


def test_error_behind_it_is_shown_where_it_is_of_the_users_code(shell, capsys):
    shell.run_cell(
        "from patchlab.errors import SwapError\n"
        "try:\n    1 / 0\n"
        "except ZeroDivisionError as error:\n    raise SwapError('no') from error"
    )
    printed = capsys.readouterr().out

    assert "----> 3     1 / 0" in printed
    assert "direct cause" in printed


def test_other_errors_keep_every_line(shell, capsys):
    """Guards the tests above: what they do not find is there for errors of another kind."""
    shell.run_cell("from patchlab.mapping import rules\nrules.compile_pattern('(')")

    assert "rules.py" in capsys.readouterr().out


def test_without_the_extension_errors_are_shown_whole(shell, capsys):
    shell.run_cell("import patchlab\n%unload_ext patchlab\npatchlab.explain('PL9')")

    assert "explain.py" in capsys.readouterr().out
    assert not hasattr(PatchlabError, "_render_traceback_")


def test_traceback_of_patchlab_alone_stays_as_it_is():
    try:
        exec("raise ValueError", {"__name__": "patchlab.inside"})
    except ValueError:
        own = sys.exc_info()[2].tb_next

    assert without_own_lines(own) is own
    assert without_own_lines(None) is None
