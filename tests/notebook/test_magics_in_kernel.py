"""`%%patched` in a real kernel, as JupyterLab, nbclient and papermill run it."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SETUP = """
%load_ext patchlab
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention
config = BertConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20
)
class MyAttention(BertSelfAttention):
    pass
def patched(model):
    return sum(type(m) is MyAttention for m in model.modules())
"""
PATCHED = "%%patched ^BertSelfAttention$=MyAttention\n"
BUILD = "model = BertModel(config)\n"
SAID = "model: 2 × BertSelfAttention → MyAttention · restored\n"


class Kernel:
    """One kernel that runs cells in turn and keeps their outputs."""

    def __init__(self, client):
        self.client = client

    def run(self, source):
        """Run a cell and return its outputs; `CellExecutionError` if the reply is an error."""
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        self.client.execute_cell(cell, len(self.client.nb.cells) - 1)
        return cell.outputs

    def fails(self, source):
        """Run a cell that must fail and return its outputs."""
        with pytest.raises(CellExecutionError):
            self.run(source)
        return self.client.nb.cells[-1].outputs

    def value(self, expression):
        """Return the text of an expression's value."""
        (output,) = self.run(expression)
        return output.data["text/plain"]


@pytest.fixture(scope="module")
def kernel():
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=120, kernel_name="python3")
    with client.setup_kernel():
        running = Kernel(client)
        running.run(SETUP)
        yield running


def texts(outputs, kind="stream"):
    """Return the texts of the streams, or the values shown, of a cell."""
    if kind == "stream":
        return "".join(o.text for o in outputs if o.output_type == "stream")
    return [o.data["text/plain"] for o in outputs if o.output_type == kind]


def assert_nothing_left(kernel):
    assert kernel.value("patched(BertModel(config))") == "0"


def test_patched_cell_succeeds_and_says_what_happened(kernel):
    outputs = kernel.run(PATCHED + BUILD)

    assert texts(outputs) == SAID
    assert kernel.value("patched(model)") == "2"
    assert_nothing_left(kernel)


@pytest.mark.parametrize(("body", "shown"), [("40 + 2", ["42"]), ("40 + 2;", []), ("x = 42", [])])
def test_last_value_is_the_cells_result_once(kernel, body, shown):
    outputs = kernel.run(PATCHED + BUILD + body)

    assert texts(outputs, "execute_result") == shown
    assert texts(outputs) == SAID


def test_result_is_kept_in_out_under_its_number(kernel):
    outputs = kernel.run(PATCHED + "40 + 2")

    (result,) = [o for o in outputs if o.output_type == "execute_result"]
    assert kernel.value(f"Out[{result.execution_count}]") == "42"


def test_await_in_the_body_sees_the_patch_before_and_after(kernel):
    body = (
        "import asyncio\n"
        "one = BertModel(config)\nawait asyncio.sleep(0.01)\ntwo = BertModel(config)"
    )
    outputs = kernel.run(PATCHED + body + "\nawait asyncio.sleep(0, 42)")

    assert kernel.value("patched(one), patched(two)") == "(2, 2)"
    assert texts(outputs, "execute_result") == ["42"]
    assert texts(outputs).count("restored") == 2
    assert_nothing_left(kernel)


def test_task_that_outlives_its_cell_is_not_patched_any_more(kernel):
    body = (
        "import asyncio\n"
        "async def late():\n    await asyncio.sleep(0.05)\n    return patched(BertModel(config))\n"
        "task = asyncio.ensure_future(late())"
    )
    kernel.run(PATCHED + body)

    assert kernel.value("await task") == "0"


FAULTS = {
    "an error": ("1/0", "ZeroDivisionError"),
    "an error after the build": (BUILD + "1/0", "ZeroDivisionError"),
    "an error after an await": ("import asyncio\nawait asyncio.sleep(0)\n1/0", "ZeroDivisionError"),
    "an interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "no Python": ("x = = 1", "SyntaxError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_cell_fails_once_and_nothing_stays_patched_after(kernel, fault):
    body, name = FAULTS[fault]
    outputs = kernel.fails(PATCHED + body)

    assert [o.ename for o in outputs if o.output_type == "error"] == [name]
    assert_nothing_left(kernel)


def test_traceback_points_at_the_line_as_it_was_typed(kernel):
    outputs = kernel.fails("# above\n" + PATCHED + "x = 1\nboom = 1 / 0\n")

    (error,) = [o for o in outputs if o.output_type == "error"]
    plain = "\n".join(error.traceback)
    assert "line 4" in plain
    assert "patchlab/" not in plain


def test_interrupt_from_outside_restores_and_fails_the_cell(kernel):
    """A real SIGINT, while the body waits in Python code and while it waits in an await."""
    send = (
        "import os, signal, threading, time, asyncio\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    )
    for wait in ("time.sleep(20)", "await asyncio.sleep(20)"):
        outputs = kernel.fails(PATCHED + send + BUILD + wait)

        (error,) = [o for o in outputs if o.output_type == "error"]
        assert error.ename in ("KeyboardInterrupt", "CancelledError")
        assert_nothing_left(kernel)


def test_usage_error_fails_the_cell_without_a_traceback(kernel):
    outputs = kernel.fails("%%patched BertSelfAttention=MyAtention\nran = True")

    assert "Did you mean MyAttention?" in texts(outputs)
    assert kernel.value("'ran' in globals()") == "False"


def test_run_all_stops_at_the_cell_that_fails():
    cells = [SETUP, PATCHED + "1/0", "print('not reached')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()

    assert notebook.cells[2].execution_count is None
    assert notebook.cells[2].outputs == []


@pytest.mark.parametrize("cell", ["%%time\n" + PATCHED, PATCHED + "%%time\n"])
def test_stacked_with_time(kernel, cell):
    outputs = kernel.run(cell + BUILD + "40 + 2")

    assert texts(outputs, "execute_result") == ["42"]
    assert SAID in texts(outputs)
    assert_nothing_left(kernel)


@pytest.mark.parametrize("cell", ["%%time\n" + PATCHED, PATCHED + "%%time\n"])
def test_stacked_with_time_an_error_fails_the_cell_once(kernel, cell):
    outputs = kernel.fails(cell + "1/0")

    assert [o.ename for o in outputs if o.output_type == "error"] == ["ZeroDivisionError"]
    assert_nothing_left(kernel)


def test_table_of_patches_is_shown_as_html_and_text(kernel):
    (shown,) = kernel.run("%patches register ^BertSelfAttention$=MyAttention")
    kernel.run("%patches clear")

    assert {"text/plain", "text/html"} <= set(shown.data)
    assert "__main__.MyAttention" in shown.data["text/plain"]
