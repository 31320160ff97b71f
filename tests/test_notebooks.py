"""Every notebook runs whole and offline, as with “Run All”, and is kept without outputs.

A notebook checks what it says in its own asserts, so that a run which ends is a run that is right.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def run(notebook, folder, monkeypatch):
    """Run a notebook in a kernel of its own, in this folder, with no way to a model hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # Nothing listens there: whoever asks a server all the same gets an error and no answer.
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return notebook


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def kept_state(notebook):
    """Name what a run has left in a notebook: outputs, counts, widget state, marks of a run."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if cell.outputs:
                found.append(f"{cell.id}: outputs")
            if cell.execution_count is not None:
                found.append(f"{cell.id}: execution count")
        if cell.metadata:
            found.append(f"{cell.id}: {', '.join(cell.metadata)}")
    return found + sorted(set(notebook.metadata) - {"kernelspec", "language_info"})


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@named(NOTEBOOKS)
def test_notebook_runs_whole_offline_and_writes_nothing_beside_itself(path, tmp_path, monkeypatch):
    # A copy of the folder, with the files that the notebooks show or import.
    copy = shutil.copytree(FOLDER, tmp_path / "notebooks")
    before = files(copy)

    notebook = run(read(path), copy, monkeypatch)

    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert files(copy) == before


@named(NOTEBOOKS)
def test_notebook_is_kept_without_outputs_and_widget_state(path):
    assert kept_state(read(path)) == []


@named(NOTEBOOKS)
def test_last_code_cell_of_a_notebook_asserts(path):
    code = [cell.source for cell in read(path).cells if cell.cell_type == "code"]

    assert "assert " in code[-1]


def test_there_are_notebooks():
    """Guards the tests above, which have nothing to do where no notebook is found."""
    assert [path.name for path in NOTEBOOKS][:1] == ["01-first-patch.ipynb"]


def test_run_fails_where_a_cell_fails(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])

    with pytest.raises(CellExecutionError, match="assert 1 == 2"):
        run(notebook, tmp_path, monkeypatch)


def test_what_a_run_leaves_in_a_notebook_is_found(tmp_path, monkeypatch):
    cell = nbformat.v4.new_code_cell("import ipywidgets\nipywidgets.IntSlider()", id="slider")
    notebook = run(nbformat.v4.new_notebook(cells=[cell]), tmp_path, monkeypatch)

    assert {"slider: outputs", "slider: execution count", "widgets"} <= set(kept_state(notebook))
