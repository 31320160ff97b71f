"""What README.md shows is true: every block runs in order, and prints what stands under it.

Python blocks, cells with magics included, run in one kernel as if they were the cells of a
notebook. A `text` block after one of them is what it prints; a line with nothing but … stands for
any lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import patchlab
from patchlab.model.catalog import load_catalog

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOTS = "…"


@dataclass
class Block:
    """A fenced block, with the line of the file that it begins in."""

    line: int
    language: str
    text: str


def blocks_of(document):
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", document, re.DOTALL | re.MULTILINE):
        line = document.count("\n", 0, match.start()) + 1
        found.append(Block(line, match[1], match[2]))
    return found


def run_blocks(blocks, folder):
    """Run the Python blocks as a notebook, and return (text block, what was printed) for each."""
    notebook = nbformat.v4.new_notebook()
    shown = []
    for block in blocks:
        if block.language == "python":
            notebook.cells.append(nbformat.v4.new_code_cell(block.text.rstrip("\n")))
        elif block.language == "text":
            shown.append((block, notebook.cells[-1]))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return [(block, printed_by(cell)) for block, cell in shown]


def printed_by(cell):
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif output.output_type in ("execute_result", "display_data"):
            texts.append(output.data["text/plain"] + "\n")
    return "".join(texts)


def is_shown(expected, printed):
    """Tell whether a text is what a block shows; a line … is any number of lines, none included."""
    parts = [
        "(?:.*\n)*" if line.strip() == DOTS else re.escape(line.rstrip()) + "\n"
        for line in expected.splitlines()
    ]
    lines = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    return re.fullmatch("".join(parts), lines) is not None


def test_every_block_of_the_readme_runs_and_prints_what_it_shows(tmp_path):
    # Once per version transformers' source is read, under a progress bar that no block shows.
    load_catalog()
    shown = run_blocks(blocks_of(README), tmp_path)

    assert shown
    for block, printed in shown:
        assert is_shown(block.text, printed), f"README.md, line {block.line}, prints:\n{printed}"


def test_readme_names_every_public_function_and_no_other():
    named = set(re.findall(r"\bpatchlab\.([a-z]\w*)", README))
    functions = {name for name in patchlab.__all__ if name[0].islower()}
    rooms = {path.parent.name for path in (ROOT / "patchlab").glob("*/__init__.py")}

    assert named - functions - rooms == set()
    assert functions - named == {"load_ipython_extension", "unload_ipython_extension"}


def test_commands_of_the_readme_are_there():
    commands = re.findall(r"^\./dev (\w+)([\w ]*)", README, re.MULTILINE)
    help_text = (ROOT / "dev").read_text(encoding="utf-8")

    assert {"lab", "test", "bench"} <= {command for command, _ in commands}
    for command, words in commands:
        assert f"    ./dev {command}" in help_text
        assert command != "bench" or all(
            (ROOT / "benchmarks" / f"bench_{name}.py").is_file() for name in words.split()
        )


def test_files_that_the_readme_links_to_are_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


# The checks themselves


def test_a_block_that_prints_something_else_is_told(tmp_path):
    blocks = blocks_of("```python\nprint(1)\n2\n```\n```text\n1\n3\n```\n")

    ((block, printed),) = run_blocks(blocks, tmp_path)

    assert (block.line, printed) == (5, "1\n2\n")
    assert not is_shown(block.text, printed)


def test_a_block_that_fails_is_an_error(tmp_path):
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run_blocks(blocks_of("```python\n1 / 0\n```\n"), tmp_path)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\nb\n", False),
        ("a.\n", "ab\n", False),
    ],
)
def test_dots_stand_for_any_lines_and_all_else_for_itself(expected, printed, same):
    assert is_shown(expected, printed) is same
