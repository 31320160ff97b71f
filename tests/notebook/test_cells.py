"""The source of a class is that of the cell which defined this very class."""

from __future__ import annotations

import gc
import weakref

from patchlab.notebook.cells import cell_source
from patchlab.ship.sources import class_statement

TWO = """
x = 1
@torch.no_grad
def f(): pass

class First(nn.Module):
    def forward(self, x):
        return x  # kept with its comment

@kept
class Second(First): pass
"""


def test_class_statement_comes_back_as_it_was_typed(shell):
    shell.run_cell("kept = lambda cls: cls").raise_error()
    shell.run_cell(TWO).raise_error()

    first, second = shell.user_ns["First"], shell.user_ns["Second"]
    assert class_statement(first).text == (
        "class First(nn.Module):\n    def forward(self, x):\n"
        "        return x  # kept with its comment\n"
    )
    assert class_statement(second).text == "@kept\nclass Second(First): pass\n"
    assert cell_source(first) == cell_source(second) == TWO.lstrip("\n")


def test_class_of_a_patched_cell_has_its_source(shell):
    shell.run_cell("%%patched A=MyAttention\nclass Inner(nn.Module):\n    pass").raise_error()

    assert class_statement(shell.user_ns["Inner"]).text == "class Inner(nn.Module):\n    pass\n"


def test_functions_and_what_a_cell_magic_runs_are_kept_too(shell):
    cell = "%%time\ndef helper(x):\n    return x\n\nclass Timed(nn.Module): pass"
    shell.run_cell(cell).raise_error()

    body = cell.partition("\n")[2]
    assert cell_source(shell.user_ns["helper"]).strip() == body
    assert class_statement(shell.user_ns["Timed"]).text == "class Timed(nn.Module): pass\n"
    assert cell_source(len) is None


def test_class_that_is_defined_again_has_its_own_source_and_the_older_one_keeps_its(shell):
    shell.run_cell("class Again: version = 1").raise_error()
    older = shell.user_ns["Again"]
    shell.run_cell("class Again: version = 2").raise_error()

    assert class_statement(older).text == "class Again: version = 1\n"
    assert class_statement(shell.user_ns["Again"]).text == "class Again: version = 2\n"


def test_name_in_a_branch_that_did_not_run_is_not_taken_for_the_class(shell):
    shell.run_cell("class Kept: pass").raise_error()
    shell.run_cell("if False:\n    class Kept: other = 1").raise_error()

    assert class_statement(shell.user_ns["Kept"]).text == "class Kept: pass\n"


def test_class_from_elsewhere_has_none(shell):
    shell.run_cell("from torch.nn import Linear\ndef f():\n    class Linear: pass").raise_error()

    assert cell_source(shell.user_ns["Linear"]) is None
    assert cell_source(int) is None


def test_source_keeps_no_class_alive(shell):
    shell.run_cell("class Gone: pass").raise_error()
    gone = weakref.ref(shell.user_ns.pop("Gone"))
    gc.collect()

    assert gone() is None


def test_cell_that_is_no_python_is_passed_over(shell):
    assert not shell.run_cell("class = 3").success
    shell.run_cell("class Fine: pass").raise_error()

    assert class_statement(shell.user_ns["Fine"]).text == "class Fine: pass\n"
