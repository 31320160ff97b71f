"""DOT: one node a row whatever the names are, and a picture or a hint but never an error."""

from __future__ import annotations

import re
import sys

import graphviz
import pytest
from hypothesis import given
from torch import nn

from patchlab.model.tree import module_tree
from patchlab.render.dot import HINT, dot_svg, table_dot
from patchlab.render.rows import Row, Table
from patchlab.render.text import printable
from tests.toy_tables import COLUMNS, tables

NODE = re.compile(r'^  (n\d+) \[label="((?:[^"\\]|\\.)*)", ')
EDGE = re.compile(r"^  (n\d+) -> (n\d+)$")
LINE = re.compile(r"^(digraph \{|\}|  (graph|node|edge|more|n\d+) \[.*\]|  n\d+ -> n\d+|)$")


def read_label(text):
    """Undo the quoting of a DOT string; a line break in the label becomes one."""
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text)


@given(tables())
def test_every_row_is_one_node_with_its_text_as_label(table):
    lines = table_dot(table).split("\n")
    nodes = [NODE.match(line).groups() for line in lines if NODE.match(line)]

    assert all(LINE.match(line) for line in lines)
    assert [name for name, _ in nodes] == [f"n{n}" for n in range(len(table.rows))]
    for (_, label), row in zip(nodes, table.rows, strict=True):
        assert printable(row.label) in read_label(label).split("\n")[0]


@given(tables())
def test_every_row_but_the_root_hangs_on_the_row_above_it(table):
    edges = [
        EDGE.match(line).groups() for line in table_dot(table).split("\n") if "->" in line[:20]
    ]
    depths = [row.depth for row in table.rows]
    expected = [
        (max(p for p in range(place) if depths[p] == depths[place] - 1), place)
        for place in range(1, len(depths))
    ]

    assert edges == [(f"n{parent}", f"n{place}") for parent, place in expected]


@pytest.mark.parametrize("name", ["m.a:b", "<b>bold</b>", 'a"b', "a\\", "a\\n", "a|b{c}", "层"])
def test_a_name_with_a_meaning_to_graphviz_is_a_label_and_no_more(name):
    table = Table(COLUMNS, (Row(0, "root", ("R", "")), Row(1, name, ("C", "1"))))
    (label,) = [
        m[2] for line in table_dot(table).split("\n") if (m := NODE.match(line)) and m[1] == "n1"
    ]

    assert read_label(label) == f"{name}\nC · 1"


def test_large_graphs_are_capped_and_say_so():
    table = Table(COLUMNS, tuple(Row(bool(n), str(n), ("C", "1")) for n in range(500)))
    dot = table_dot(table)

    assert len(NODE.findall(dot)) + dot.count("\n  n") - dot.count(" -> ") < 302
    assert "200 more rows are not drawn" in dot


@pytest.fixture
def no_graphviz(monkeypatch):
    """Neither pygraphviz nor a `dot` program."""
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2))


def program(folder, text):
    path = folder / "dot"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_graphviz_the_tree_and_a_hint_are_shown(no_graphviz, model):
    source = module_tree(model).to_graphviz()
    bundle = source._repr_mimebundle_()

    assert isinstance(source, graphviz.Source)
    assert HINT in bundle["text/html"]
    assert "Linear" in bundle["text/html"]
    assert "digraph" in bundle["text/plain"]
    assert "image/svg+xml" not in bundle


def test_with_the_dot_program_a_picture_is_shown(no_graphviz, model, tmp_path, monkeypatch):
    program(tmp_path, "echo '<?xml version=\"1.0\"?><svg>drawn</svg>'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    bundle = module_tree(model).to_graphviz()._repr_mimebundle_()

    assert bundle["image/svg+xml"].startswith("<svg>drawn</svg>")
    assert "text/html" not in bundle


@pytest.mark.parametrize("text", ["exit 1", "echo no picture", "kill -9 $$"])
def test_a_dot_program_that_fails_is_no_error(no_graphviz, model, tmp_path, monkeypatch, text):
    program(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert HINT in module_tree(model).to_graphviz()._repr_mimebundle_()["text/html"]


def test_pygraphviz_is_asked_first(no_graphviz, monkeypatch, tmp_path):
    (tmp_path / "pygraphviz.py").write_text(
        "class AGraph:\n"
        "    def __init__(self, string): self.string = string\n"
        "    def draw(self, format, prog): return b'<svg>' + self.string.encode() + b'</svg>'\n"
    )
    monkeypatch.delitem(sys.modules, "pygraphviz")
    monkeypatch.syspath_prepend(tmp_path)

    assert dot_svg("digraph {}") == "<svg>digraph {}</svg>"
    sys.modules.pop("pygraphviz")


@pytest.mark.parametrize("error", ["ImportError", "OSError", "ValueError"])
def test_a_pygraphviz_that_fails_leaves_it_to_the_program(
    no_graphviz, monkeypatch, tmp_path, error
):
    (tmp_path / "pygraphviz.py").write_text(f"raise {error}('built for another Graphviz')")
    program(tmp_path, "echo '<svg/>'")
    monkeypatch.delitem(sys.modules, "pygraphviz")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert dot_svg("digraph {}") == "<svg/>\n"
