"""`%%patched` under and over other cell magics: what each of them does is done once."""

from __future__ import annotations

import pytest

from tests.notebook.patched_cells import BUILD, PATCHED, SAID, assert_nothing_left, replaced


@pytest.mark.parametrize(
    "cell",
    [
        f"%%time\n{PATCHED}{BUILD}40 + 2",
        f"{PATCHED}%%time\n{BUILD}40 + 2",
        f"{PATCHED}\n# a comment is no magic\n{BUILD}40 + 2",
    ],
)
def test_stacked_under_and_over_time_the_last_value_is_shown(shell, capsys, cell):
    result = shell.run_cell(cell)

    assert result.result == 42
    assert replaced(shell) == 2
    assert SAID in capsys.readouterr().out
    assert_nothing_left(shell)


@pytest.mark.parametrize("cell", [f"%%time\n{PATCHED}1/0", f"{PATCHED}%%time\n1/0"])
def test_error_under_and_over_time_fails_the_cell_once(shell, capsys, cell):
    result = shell.run_cell(cell)

    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert capsys.readouterr().out.count("ZeroDivisionError: ") == 1
    assert_nothing_left(shell)


def test_under_capture_what_is_said_is_captured(shell, capsys):
    shell.run_cell(f"%%capture said\n{PATCHED}{BUILD}").raise_error()

    assert replaced(shell) == 2
    assert SAID in shell.user_ns["said"].stdout
    assert capsys.readouterr().out == ""
    assert_nothing_left(shell)


def test_over_capture_the_body_is_captured_and_the_line_is_shown(shell, capsys):
    shell.run_cell(f"{PATCHED}%%capture said\n{BUILD}print('body')").raise_error()

    assert shell.user_ns["said"].stdout == "body\n"
    assert capsys.readouterr().out == f"model: {SAID}\n"
    assert_nothing_left(shell)


def test_two_lines_stack(shell):
    shell.run_cell("class Out(nn.Module):\n  def __init__(s, c): super().__init__()").raise_error()

    shell.run_cell(f"{PATCHED}%%patched BertSelfOutput=Out\n{BUILD}").raise_error()

    assert replaced(shell) == 2
    assert sum(type(m).__name__ == "Out" for m in shell.user_ns["model"].modules()) == 2
    assert_nothing_left(shell)
