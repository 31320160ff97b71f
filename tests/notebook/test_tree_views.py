"""The widget as the rich view of a tree: only while it is switched on, and never alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import BertConfig

from patchlab.model.diff import diff_trees
from patchlab.model.tree import module_tree
from patchlab.notebook.tree_views import hide_widgets, show_widgets, widget_for
from patchlab.render.payload import unpack_marks
from patchlab.render.rows import Column, Table
from patchlab.render.shown import Shown, rich_views
from patchlab.routing.trace import Router, Routes, RoutingTrace, TokenBlock
from patchlab.verify.preview import preview

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


FQN = "layers.0.gate"
TRACE = RoutingTrace(
    Routes(
        (Router(FQN, 0, 4, 2, "model"),),
        {FQN: torch.tensor([[0, 3], [1, 2]])},
        {"model": (TokenBlock(1, 2),)},
        "toy",
        1,
    )
)


@pytest.mark.parametrize("value", [TREE, DIFF, TRACE])
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


class Mine(nn.Module):
    def __init__(self, config, is_causal=False, layer_idx=None):
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states, None


CONFIG = BertConfig(
    num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=20
)


def states_of(widget):
    packed = unpack_marks(widget.highlight, len(widget._fqns))
    return {fqn: state for fqn, state in zip(widget._fqns, packed, strict=True) if state != "none"}


def test_preview_shows_its_difference_its_findings_and_the_rule_of_each_module():
    shown = preview(CONFIG, {"^BertSelfAttention$": Mine})
    widget = widget_for(shown)
    widget.selected = "encoder.layer.0.attention.self"

    assert widget.verdict["text"].startswith("**2 modules** replaced by 1 rule in **BertModel** · ")
    assert [finding["code"] for finding in widget.findings] == [f.code for f in shown.findings]
    assert [side["class_name"] for side in widget.details["sides"]] == ["BertSelfAttention", "Mine"]
    assert widget.details["rule"] == "'^BertSelfAttention$' (pattern) puts Mine here."
    assert set(shown.plan.fqns) <= set(states_of(widget))


def test_preview_of_a_key_that_is_too_wide_shows_the_container_and_what_it_swallows():
    states = states_of(widget_for(preview(CONFIG, {".*Attention": Mine})))

    assert states["encoder.layer.1.attention"] == "container"
    assert states["encoder.layer.1.attention.self"] == "swallowed"
    assert states["encoder.layer.1.attention.output.dense"] == "swallowed"


def test_preview_that_cannot_be_built_shows_the_tree_before():
    class Fails(Mine):
        def __init__(self, *args, **kwargs):
            raise RuntimeError("no")

    widget = widget_for(preview(CONFIG, {"BertSelfAttention": Fails}))

    assert widget.verdict["tone"] == "error"
    assert states_of(widget)["encoder.layer.0.attention.self"] == "exact"
