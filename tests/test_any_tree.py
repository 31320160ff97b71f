"""Any model, also one that holds itself or has names that are markup: every form of it is made."""

from __future__ import annotations

from html.parser import HTMLParser

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import patchlab
from patchlab.model.diff import apply_diff
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.render.dot import table_dot
from tests.toy_trees import toy_models

ODD = [
    "<script>alert(1)</script>", "a&b", "\"'`", "]]>", "\\n", "\n", "\r", "\t", "\x00", "\x1b[31m",
    "\u202e", "\u2028", "層", "🤖", "a" * 300, "{}|<>", "0", "-1", "__class__", " ", "%s",
]  # fmt: skip


@st.composite
def any_models(draw):
    """Draw a model: shared modules, cycles, empty classes, odd names of children and classes."""
    model = draw(toy_models())
    modules = list(model.modules())
    for name in draw(st.lists(st.sampled_from(ODD), max_size=3, unique=True)):
        cls = type(draw(st.sampled_from(ODD)).replace("\x00", "0"), (nn.Module,), {})
        cls.__module__ = draw(st.sampled_from(["", "toys", "<i>", "a.b"]))
        made = cls()
        if draw(st.booleans()):
            made.register_buffer("steps", draw(st.sampled_from([None, torch.zeros(2)])))
        draw(st.sampled_from(modules))._modules[name] = made
        modules.append(made)
    for name in draw(st.lists(st.sampled_from(ODD), max_size=2, unique=True)):
        # Up, down or to itself. How many paths that makes is cut off at 100,000, which takes time.
        parent, child = draw(st.sampled_from(modules)), draw(st.sampled_from(modules))
        parent._modules[name] = child
    assume(len(patchlab.module_tree(model)) < 500)
    return model


class Tags(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


KNOWN = Tags(patchlab.module_tree(nn.Sequential(nn.ReLU())).to_html())


def forms_of(value):
    table = value.to_table()
    text = value.to_text()
    assert all(ord(letter) >= 0x20 or letter == "\n" for letter in text)
    tags = Tags(value.to_html())
    assert not tags.tags & {"script", "i", "img", "b"}
    assert not {name for name in tags.attributes if name.startswith("on")}
    assert table_dot(table).startswith("digraph")
    assert len(value.to_frame()) >= 1
    return text


@settings(max_examples=60, deadline=None)
@given(any_models())
def test_every_form_of_any_tree_is_made(model):
    tree = patchlab.module_tree(model)

    assert forms_of(tree) == forms_of(patchlab.module_tree(model))
    widget = TreeWidget(tree)
    assert widget.payload
    assert widget.to_text()
    widget.close()


@settings(max_examples=40, deadline=None)
@given(any_models(), any_models())
def test_difference_of_any_two_trees_closes_the_circle(one, other):
    before, after = patchlab.module_tree(one), patchlab.module_tree(other)

    difference = patchlab.diff_trees(before, after)

    assert apply_diff(before, difference) == after
    forms_of(difference)
    TreeWidget(diff=difference).close()


def test_tag_that_came_through_would_be_seen():
    """Guards the tests above."""
    assert "script" in Tags("<table><script>1</script></table>").tags
    assert {"table", "tr"} <= KNOWN.tags
