"""A scope that a cell opens ends with that cell: not before, however the cell ends, and once."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from IPython.core.error import UsageError

from patchlab.notebook.cell_scopes import CellScopes


class Recorder:
    """A scope that records what happens to it."""

    def __init__(self, log, name="scope", fault=None):
        self.log, self.name, self.fault = log, name, fault

    def __enter__(self):
        if self.fault == "enter":
            raise ValueError("refused")
        self.log.append(f"{self.name} opened")
        return self.name

    def __exit__(self, *exc_info):
        if self.fault == "exit":
            raise ValueError("cannot be left")
        self.log.append(f"{self.name} closed")


class Cells:
    """A shell whose cells can open a scope with `open_scope(name)`."""

    def __init__(self, shell):
        self.shell, self.log, self.scopes = shell, [], CellScopes()
        shell.user_ns.update(open_scope=self.open, log=self.log.append, cells=self)
        shell.events.register("pre_execute", self.scopes.close_finished)
        shell.events.register("post_execute", self.scopes.close_finished)

    def open(self, name="scope", fault=None):
        told = lambda entered: self.log.append(f"{entered} told")  # noqa: E731
        self.scopes.enter(Recorder(self.log, name, fault), sys._getframe(1), told)

    def run(self, source, **options):
        return self.shell.run_cell(source, **options)


@pytest.fixture
def cells(bare_shell):
    return Cells(bare_shell)


ENDS = {
    "its last line": "log('body')",
    "an error": "log('body'); 1/0",
    "an interrupt": "log('body'); raise KeyboardInterrupt",
    "an exit": "log('body'); raise SystemExit(3)",
    "an await": "import asyncio; await asyncio.sleep(0); log('body')",
    "an error after an await": "import asyncio; await asyncio.sleep(0); log('body'); 1/0",
    "a cancelled await": "import asyncio; log('body'); raise asyncio.CancelledError",
    "an error while its value is shown": "class Odd:\n  def __repr__(s): log('body'); 1/0\nOdd()",
}


@pytest.mark.filterwarnings("ignore:To exit")
@pytest.mark.parametrize("end", ENDS)
def test_scope_is_open_for_the_body_and_closed_when_the_cell_ends_by(cells, end):
    cells.run(f"open_scope()\n{ENDS[end]}")

    assert cells.log == ["scope opened", "body", "scope closed", "scope told"]
    assert not len(cells.scopes)


@pytest.mark.parametrize("silent", [False, True])
def test_silent_cell_closes_its_scope_too(cells, silent):
    cells.run("open_scope(); log('body')", silent=silent)

    assert cells.log == ["scope opened", "body", "scope closed", "scope told"]


@pytest.mark.parametrize(
    "inner", ["log('inner')", "1/0", "", "   ", "%%capture\nlog('inner')", "x ="]
)
def test_scope_outlives_a_cell_that_runs_inside_its_cell(cells, inner):
    cells.run(f"open_scope()\nget_ipython().run_cell({inner!r})\nlog('body')")

    assert cells.log[-3:] == ["body", "scope closed", "scope told"]
    assert "scope closed" not in cells.log[:-3]


def test_scope_of_an_inner_cell_ends_with_the_inner_cell(cells):
    cells.run(
        "open_scope('outer')\n%time get_ipython().run_cell('open_scope(\"inner\")')\nlog('body')"
    )

    assert cells.log == [
        *("outer opened", "inner opened", "inner closed", "inner told"),
        *("body", "outer closed", "outer told"),
    ]


def test_two_scopes_of_a_cell_close_in_reverse_order(cells):
    cells.run("open_scope('a')\nopen_scope('b')")

    assert [entry for entry in cells.log if "closed" in entry] == ["b closed", "a closed"]


def test_body_that_is_run_many_times_has_its_scope_open_once(cells):
    """As under %%timeit, which runs its body in a loop of its own."""
    cells.run("for i in range(3): open_scope(i)")

    opened = [entry for entry in cells.log if "told" not in entry]
    assert opened == [
        *("0 opened", "0 closed", "1 opened", "1 closed", "2 opened", "2 closed"),
    ]
    assert [entry for entry in cells.log if "told" in entry] == ["2 told"]


def test_scope_that_refuses_to_open_is_forgotten_and_the_cell_fails(cells):
    result = cells.run("open_scope(fault='enter')\nlog('body')")

    assert isinstance(result.error_in_exec, ValueError)
    assert cells.log == []
    assert not len(cells.scopes)


def test_scope_that_cannot_be_left_does_not_keep_the_others_open(cells, capsys):
    cells.run("open_scope('a')\nopen_scope('b', fault='exit')\nopen_scope('c')")
    cells.run("log('next')")

    assert [entry for entry in cells.log if "closed" in entry] == ["c closed", "a closed"]
    assert cells.log[-1] == "next"
    assert "cannot be left" in capsys.readouterr().out


def test_no_cell_is_running_outside_of_ipython(cells):
    with pytest.raises(UsageError, match=r"with patchlab\.patched"):
        cells.open()


def transformed(cells, source):
    """Run a cell as a front end that sends no events after it."""
    shell = cells.shell
    return shell.run_cell_async(source, transformed_cell=shell.transform_cell(source))


def test_scope_whose_end_nobody_announced_is_closed_before_the_next_cell(cells):
    asyncio.run(transformed(cells, "open_scope()\nlog('body')"))
    assert len(cells.scopes) == 1

    cells.run("log('next')")

    assert cells.log == ["scope opened", "body", "scope closed", "scope told", "next"]


def test_cell_that_waits_keeps_its_scope_while_other_cells_run(cells):
    """Cells in tasks of their own, as in a kernel with an event loop: each has its own scope."""

    async def main():
        waits = asyncio.Event()
        cells.shell.user_ns["go"] = waits
        first = asyncio.ensure_future(
            transformed(cells, "open_scope('a')\nawait go.wait()\nlog('a')")
        )
        await asyncio.sleep(0)
        await asyncio.ensure_future(transformed(cells, "open_scope('b')\nlog('b')"))
        cells.shell.events.trigger("post_execute")
        assert cells.log == ["a opened", "b opened", "b", "b closed", "b told"]
        waits.set()
        await first
        cells.shell.events.trigger("post_execute")

    asyncio.run(main())

    assert cells.log[5:] == ["a", "a closed", "a told"]


def test_cell_that_shares_its_task_with_what_follows_is_over_when_it_has_returned(cells):
    """As in a kernel, whose loop runs a cell without await in the task that runs all of them."""

    async def main():
        await transformed(cells, "open_scope()\nlog('body')")
        cells.shell.events.trigger("post_execute")
        assert cells.log == ["scope opened", "body", "scope closed", "scope told"]
        cells.run("open_scope('next')")

    asyncio.run(main())

    assert cells.log[4:] == ["next opened", "next closed", "next told"]


@pytest.mark.parametrize("has_a_loop", [False, True])
def test_events_of_one_thread_leave_the_scopes_of_another_alone(cells, has_a_loop):
    started, go = threading.Event(), threading.Event()
    cells.shell.user_ns.update(started=started, go=go)
    source = "open_scope()\nstarted.set()\ngo.wait(10)\nlog('body')"

    def run():
        if has_a_loop:
            asyncio.run(transformed(cells, source))
        else:
            cells.run(source)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(10)

    cells.shell.events.trigger("post_execute")
    assert cells.log == ["scope opened"]

    go.set()
    thread.join()
    cells.shell.events.trigger("post_execute")
    assert cells.log == ["scope opened", "body", "scope closed", "scope told"]


def test_closing_all_says_nothing(cells):
    cells.run("open_scope()\ncells.scopes.close()\nlog('body')")

    assert cells.log == ["scope opened", "scope closed", "body"]
