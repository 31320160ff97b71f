"""The widget as the rich view of a tree: only while it is switched on, and never alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from patchlab.model.diff import diff_trees
from patchlab.model.tree import module_tree
from patchlab.notebook.tree_views import hide_widgets, show_widgets, widget_for
from patchlab.render.rows import Column, Table
from patchlab.render.shown import Shown, rich_views

VIEW = "application/vnd.jupyter.widget-view+json"
TREE = module_tree(nn.Sequential(nn.Linear(2, 2)))
DIFF = diff_trees(TREE, nn.Sequential(nn.ReLU()))


@pytest.fixture
def shown():
    before = list(rich_views)
    show_widgets()
    yield
    hide_widgets()
    rich_views[:] = before


@pytest.mark.parametrize("value", [TREE, DIFF])
def test_widget_comes_with_the_values_own_text_and_html(shown, value):
    bundle = value._repr_mimebundle_()

    assert VIEW in bundle
    assert bundle["text/plain"] == value.to_text()
    assert bundle["text/html"] == value.to_html()


def test_values_that_are_no_trees_show_no_widget(shown):
    class Other(Shown):
        def to_table(self, **options):
            return Table((Column("a"),), ())

    assert VIEW not in Other()._repr_mimebundle_()
    assert widget_for(3) is None


def test_switched_off_a_tree_shows_text_and_html_alone():
    show_widgets()
    show_widgets()
    hide_widgets()

    assert set(TREE._repr_mimebundle_()) == {"text/plain", "text/html"}


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("from patchlab.notebook.tree_views import show_widgets; show_widgets()", False),
        ("import patchlab.notebook.tree_widget", True),
    ],
)
def test_switching_on_loads_no_widget_library(code, loaded):
    probe = f"import sys; {code}; print('anywidget' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True
    ).stdout

    assert found.strip() == str(loaded)
