"""`%%patched` in a real shell: its body runs as if alone, and the patch ends with the cell."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from IPython.core.error import UsageError

import patchlab
from tests.notebook.patched_cells import BUILD, PATCHED, SAID, assert_nothing_left, replaced


def test_models_built_in_the_cell_are_patched_and_those_after_it_are_not(shell, capsys):
    shell.run_cell(PATCHED + BUILD).raise_error()

    assert replaced(shell) == 2
    assert capsys.readouterr().out.endswith(f"model: {SAID}\n")
    assert_nothing_left(shell)


def test_variables_of_the_body_land_in_the_namespace(shell):
    shell.run_cell(PATCHED + "import math as m\ndef f(): return later\nlater = 7").raise_error()

    assert shell.run_cell("f() + m.floor(1.5)").result == 8


# The body runs as if it stood alone


@pytest.mark.parametrize(
    ("body", "shown"), [("40 + 2", True), ("40 + 2;", False), ("x = 42", False)]
)
def test_last_value_is_shown_once_unless_hidden(shell, capsys, body, shown):
    result = shell.run_cell(PATCHED + body, store_history=True)

    assert capsys.readouterr().out.count("42") == shown
    assert (result.execution_count in shell.user_ns["Out"]) is shown


def test_await_works_at_the_top_level_of_the_body(shell, capsys):
    body = "import asyncio\nawait asyncio.sleep(0)\n" + BUILD + "await asyncio.sleep(0, 42)"
    result = shell.run_cell(PATCHED + body)

    assert result.result == 42
    assert replaced(shell) == 2
    assert SAID in capsys.readouterr().out
    assert_nothing_left(shell)


def test_shell_and_line_magics_work_in_the_body(shell):
    shell.run_cell(PATCHED + "%time " + BUILD + "files = !echo one").raise_error()

    assert replaced(shell) == 2
    assert list(shell.user_ns["files"]) == ["one"]


FAULTS = {
    "an error": "1/0",
    "an error after the build": BUILD + "1/0",
    "an error in the build": "BertModel(None)",
    "an interrupt": BUILD + "raise KeyboardInterrupt",
    "an error after an await": "import asyncio\nawait asyncio.sleep(0)\n" + BUILD + "1/0",
    "a line that is no Python": "x =",
    "an indent that is none": "x = 1\n  y = 2",
    "an unknown magic": "%nosuchmagic",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_cell_fails_with_one_traceback_and_nothing_stays_patched_after(shell, capsys, fault):
    result = shell.run_cell(PATCHED + FAULTS[fault])

    assert not result.success
    streams = capsys.readouterr()
    printed = streams.out + streams.err
    assert len(re.findall(r"^\w*(?:Error|Interrupt): ", printed, re.MULTILINE)) == 1, printed
    assert_nothing_left(shell)


@pytest.mark.parametrize("above", ["", "# a comment\n", "# two\n\n  # lines\n"])
def test_traceback_points_at_the_line_as_it_was_typed(shell, capsys, above):
    result = shell.run_cell(above + PATCHED + "x = 1\n\nboom = 1 / 0\ny = 2")

    assert isinstance(result.error_in_exec, ZeroDivisionError)
    printed = capsys.readouterr().out
    line = above.count("\n") + 4
    assert f"----> {line} boom = 1 / 0" in printed
    assert f"{line - 3} # {PATCHED}" in printed
    assert "patchlab" not in printed
    assert "PatchMagics" not in printed


def test_traceback_of_an_error_in_a_constructor_has_no_line_of_patchlab(shell, capsys):
    shell.run_cell("class Failing(BertSelfAttention):\n  def __init__(self, *a, **k): 1 / 0")

    shell.run_cell(f"%%patched BertSelfAttention=Failing --quiet\n{BUILD}")
    printed = capsys.readouterr().out

    assert "----> 2 model = BertModel(config)" in printed
    assert "in Failing.__init__(self, *a, **k)" in printed
    assert "skipping hidden" in printed
    assert "File patchlab" not in printed.replace(str(Path(patchlab.__file__).parent), "patchlab")


def test_function_of_a_patched_cell_has_its_source(shell):
    """The line in its place is Python too: what reads the cell's text can read on."""
    shell.run_cell(PATCHED + "def made():\n    return 1\n").raise_error()

    assert inspect.getsource(shell.user_ns["made"]) == "def made():\n    return 1\n"


def test_syntax_error_points_at_the_line_as_it_was_typed(shell, capsys):
    shell.run_cell("# above\n" + PATCHED + "x = 1\ny = = 2")

    assert "line 4" in "".join(capsys.readouterr().out.splitlines()[:2]).replace(":4", " line 4")


# The line


@pytest.mark.parametrize(
    "line",
    [
        "BertSelfAttention=MyAttention",
        r"^Bert(?=Self)\w+Attention$=MyAttention",
        "^BertSelf{0}Attention$|^BertSelfAttention{1}$=MyAttention",
        '"^BertSelfAttention$=MyAttention"',
        "'^BertSelfAttention$'=MyAttention",
        '--map="^BertSelfAttention$=MyAttention"',
        '--map "BertSelfAttention=MyAttention" BertLayer$HOME=MyLayerNorm',
        "BertSelfAttention=space.MyAttention",
    ],
)
def test_line_is_taken_literally(shell, line):
    """Braces, dollars and backslashes reach the rule as typed, though such variables exist."""
    shell.run_cell(
        "import types; HOME = 'expanded'; space = types.ModuleType('space')\n"
        "space.MyAttention = MyAttention"
    ).raise_error()

    shell.run_cell(f"%%patched {line}\n{BUILD}").raise_error()

    assert replaced(shell) == 2


def test_several_rules_are_told_in_one_line(shell, capsys):
    shell.run_cell(
        "class Twin(MyAttention): pass\n"
        "class Inter(nn.Module):\n  def __init__(self, config): super().__init__()"
    ).raise_error()
    rules = "BertSelfAttention=Twin BertIntermediate=Inter"
    shell.run_cell(f"%%patched {rules}\n{BUILD}").raise_error()

    told = "model: 2 × BertSelfAttention → Twin, 2 × BertIntermediate → Inter · restored"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("BertSelfAttention=MyAttenton", "Did you mean MyAttention"),
        ("BertSelfAttention=MyAttention.Inner", "has no 'Inner'"),
        ("BertSelfAttention=config", "must be a class"),
        ("*Attention=MyAttention", "glob"),
        ("(=MyAttention", "regular expression"),
        ("BertSelfAttention", "not a rule"),
        ("--nosuch", "no option"),
        ("--diff=1", "--diff takes no value: write --diff alone"),
        ("--model nosuch BertSelfAttention=MyAttention", "no variable 'nosuch'"),
        ("--convert nosuch BertSelfAttention=MyAttention", "no variable 'nosuch'"),
        ("'BertSelfAttention=MyAttention", "not closed"),
    ],
)
def test_line_that_cannot_be_carried_out_is_one_usage_error_and_nothing_runs(
    shell, capsys, line, said
):
    result = shell.run_cell(f"%%patched {line}\nran = True")

    assert isinstance(result.error_in_exec, UsageError)
    streams = capsys.readouterr()
    assert said in streams.err + streams.out
    assert "Traceback" not in streams.err + streams.out
    assert "ran" not in shell.user_ns
    assert_nothing_left(shell)


@pytest.mark.parametrize("above", ["x = 1\n", "import os\n\n# so\n", "if True:\n    "])
def test_line_below_code_is_told_where_it_belongs(shell, capsys, above):
    result = shell.run_cell(f"{above}{PATCHED}ran = True")

    assert isinstance(result.error_in_exec, UsageError)
    streams = capsys.readouterr()
    assert "not the first line of its cell" in streams.err + streams.out
    assert "with patchlab.patched(" in streams.err + streams.out
    assert "ran" not in shell.user_ns
    assert_nothing_left(shell)


@pytest.mark.parametrize(
    "cell", ["%%patched BertSelfAttention=MyAttention", PATCHED, PATCHED + "  \n\n"]
)
def test_empty_body_is_a_usage_error(shell, capsys, cell):
    result = shell.run_cell(cell)

    assert isinstance(result.error_in_exec, UsageError)
    assert "needs a body" in capsys.readouterr().err


def test_replacement_that_no_instance_can_become_is_a_usage_error(shell, capsys):
    """What only shows when the scope is entered stops the cell as well."""
    shell.run_cell("class Slotted(BertSelfAttention):\n    __slots__ = ('x',)").raise_error()

    result = shell.run_cell("%%patched BertSelfAttention=Slotted\nran = True")

    assert isinstance(result.error_in_exec, UsageError)
    assert "Slotted" in capsys.readouterr().err
    assert "ran" not in shell.user_ns
    assert_nothing_left(shell)


def test_strict_lets_a_clean_cell_run_and_warns_about_nothing(shell, capsys, recwarn):
    shell.run_cell(f"%%patched --strict BertSelfAttention=MyAttention Nope=MyAttention\n{BUILD}")

    assert replaced(shell) == 2
    assert "warning: PL104" in capsys.readouterr().out
    assert not [w for w in recwarn if issubclass(w.category, patchlab.errors.PatchlabWarning)]


def test_strict_stops_a_cell_whose_key_matches_a_container(shell, capsys):
    result = shell.run_cell(f"%%patched --strict .*Attention=MyAttention\nran = True\n{BUILD}")

    assert isinstance(result.error_in_exec, UsageError)
    assert "^Bert(?:Cross|Self)Attention$" in capsys.readouterr().err
    assert "ran" not in shell.user_ns
    assert_nothing_left(shell)


def test_a_container_is_told_under_the_cell_with_the_narrower_key(shell, capsys):
    shell.run_cell(f"%%patched .*Attention=MyAttention\n{BUILD}").raise_error()

    printed = capsys.readouterr().out
    assert "error: PL101" in printed
    assert "^Bert(?:Cross|Self)Attention$" in printed


def test_without_rules_what_is_registered_is_applied(shell, capsys):
    shell.run_cell("%patches register BertSelfAttention=MyAttention").raise_error()

    shell.run_cell("%%patched\n" + BUILD).raise_error()

    assert replaced(shell) == 2
    assert f"model: {SAID}" in capsys.readouterr().out
    patchlab.clear_patch_mapping()


@pytest.mark.parametrize("rules", [True, False])
def test_line_without_rules_says_so_if_nothing_is_registered_either(shell, capsys, rules):
    line = "%%patched BertSelfAttention=MyAttention" if rules else "%%patched"
    shell.run_cell(f"{line}\n{BUILD}").raise_error()

    printed = capsys.readouterr().out
    assert ("model: nothing replaced · restored" in printed) is not rules
    assert ("no rule is in force: the line has none" in printed) is not rules


def test_help_names_the_context_manager_for_where_there_are_no_magics(shell, capsys):
    shell.run_cell("%%patched?").raise_error()

    printed = capsys.readouterr().out
    assert "with patchlab.patched(" in printed
    assert "--strict" in printed


# A model that is there already


LOADED = "model = BertModel(config); before = list(model.modules())"


@pytest.mark.parametrize("end", ["", "\n1/0"])
def test_model_of_a_variable_is_swapped_for_the_cell_and_is_the_same_afterwards(shell, capsys, end):
    shell.run_cell(LOADED).raise_error()
    count = "count = sum(type(m) is MyAttention for m in model.modules())"

    shell.run_cell(f"%%patched --model model BertSelfAttention=MyAttention\n{count}{end}")

    assert shell.user_ns["count"] == 2
    after = list(shell.user_ns["model"].modules())
    assert all(a is b for a, b in zip(after, shell.user_ns["before"], strict=True))
    told = "model: 2 × BertSelfAttention → MyAttention · undone"
    assert told in capsys.readouterr().out


def test_swap_that_cannot_be_is_a_usage_error_and_changes_nothing(shell, capsys):
    shell.run_cell("number = 3").raise_error()

    result = shell.run_cell("%%patched --model number BertSelfAttention=MyAttention\nran = True")

    assert isinstance(result.error_in_exec, UsageError)
    assert "swap takes a model, got int" in capsys.readouterr().err
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize(
    ("key", "code"),
    [("BertSelfOutput", "PL301"), (".*Attention", "PL101")],
    ids=["class", "container"],
)
def test_strict_swap_with_an_error_is_undone_and_its_cell_does_not_run(shell, capsys, key, code):
    shell.run_cell(LOADED).raise_error()
    line = f"%%patched --strict --model model {key}=MyAttention\n"

    result = shell.run_cell(line + "ran = True")

    assert isinstance(result.error_in_exec, UsageError)
    assert f"the cell was not run:\n{code}" in capsys.readouterr().err
    assert "ran" not in shell.user_ns
    same = "all(a is b for a, b in zip(model.modules(), before, strict=True))"
    assert shell.run_cell(same).result


def test_key_that_swaps_nothing_is_told_and_not_warned_about(shell, capsys, recwarn):
    shell.run_cell(LOADED).raise_error()

    shell.run_cell("%%patched --model model Nope=MyAttention\nran = True").raise_error()

    printed = capsys.readouterr().out
    assert "model: nothing replaced · undone" in printed
    assert "warning: PL104" in printed
    assert not [w for w in recwarn if issubclass(w.category, patchlab.errors.PatchlabWarning)]


def test_swap_without_rules_says_so_if_nothing_is_registered_either(shell, capsys):
    shell.run_cell(LOADED).raise_error()

    shell.run_cell("%%patched --model model\nran = True").raise_error()

    assert "model: nothing replaced · undone\nno rule is in force" in capsys.readouterr().out


# What is said afterwards


def test_quiet_says_nothing(shell, capsys):
    shell.run_cell(f"%%patched --quiet BertSelfAttention=MyAttention\n{BUILD}").raise_error()

    assert capsys.readouterr().out == ""
    assert replaced(shell) == 2


def test_key_that_replaced_nothing_is_a_warning_with_the_nearest_name(shell, capsys):
    shell.run_cell(f"%%patched BertSelfAtention=MyAttention\n{BUILD}").raise_error()

    printed = capsys.readouterr().out
    assert "model: nothing replaced · restored" in printed
    assert re.search(
        r"^warning: PL104 .*'BertSelfAtention'.*BertSelfAttention", printed, re.MULTILINE
    )


def test_finding_is_told_and_not_warned_about_as_well(shell, recwarn):
    shell.run_cell(f"%%patched BertSelfAtention=MyAttention\n{BUILD}").raise_error()

    assert not [w for w in recwarn if issubclass(w.category, patchlab.errors.PatchlabWarning)]


def test_model_without_a_name_goes_by_its_class(shell, capsys):
    shell.run_cell(PATCHED + "kept = [BertModel(config)]").raise_error()

    assert f"BertModel: {SAID}" in capsys.readouterr().out


def test_models_of_a_loop_are_one_line_with_their_number(shell, capsys):
    shell.run_cell(PATCHED + "kept = [BertModel(config) for _ in range(3)]").raise_error()

    assert f"BertModel: {SAID} · 3 such models\n" in capsys.readouterr().out


def test_cell_that_builds_nothing_says_so(shell, capsys):
    shell.run_cell(PATCHED + "x = 1").raise_error()

    assert "no model was built in this cell" in capsys.readouterr().out


def test_diff_shows_what_changed_in_each_model(shell, capsys):
    shell.run_cell(f"%%patched --diff --quiet BertSelfAttention=MyAttention\n{BUILD}").raise_error()

    printed = capsys.readouterr().out
    assert "MyAttention" in printed
    assert "replaced" in printed
    assert "restored" not in printed


def test_diff_of_a_model_that_is_gone_says_so(shell, capsys):
    build = "BertModel(config)\nimport gc; gc.collect();"
    shell.run_cell(f"%%patched --diff BertSelfAttention=MyAttention\n{build}").raise_error()

    assert "BertModel" in capsys.readouterr().out


# The plain cell magic, as a program calls it


def test_plain_cell_magic_returns_the_last_value(shell, capsys):
    value = shell.run_cell_magic("patched", "^BertSelfAttention$=MyAttention", BUILD + "40 + 2\n")

    assert value == 42
    assert replaced(shell) == 2
    assert SAID in capsys.readouterr().out
    assert_nothing_left(shell)


def test_plain_cell_magic_fails_its_cell_once(shell, capsys):
    call = f"get_ipython().run_cell_magic('patched', 'A=MyAttention', {BUILD + '1/0'!r})"
    result = shell.run_cell(call)

    assert isinstance(result.error_in_exec, ZeroDivisionError)
    printed = capsys.readouterr().out
    assert printed.count("ZeroDivisionError: ") == 1
    assert "_run_body" not in printed
    assert_nothing_left(shell)


def test_plain_cell_magic_refuses_an_empty_body_and_an_await(shell):
    with pytest.raises(UsageError, match="needs a body"):
        shell.run_cell_magic("patched", "A=MyAttention", "\n")
    with pytest.raises(UsageError, match="first line"):
        shell.run_cell_magic("patched", "A=MyAttention", "import asyncio\nawait asyncio.sleep(0)\n")
