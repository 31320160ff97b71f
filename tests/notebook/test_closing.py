"""What is closed is gone, with its parts, its layout and the model it showed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ipywidgets import Widget
from torch import nn

from patchlab.notebook.forms import PatchForm
from patchlab.notebook.lab import Lab
from patchlab.notebook.routing_widget import RoutingWidget
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.routing.trace import Router, Routes, RoutingTrace, TokenBlock

FQN = "layers.0.gate"
TRACE = RoutingTrace(
    Routes(
        (Router(FQN, 0, 4, 2, "model"),),
        {FQN: torch.tensor([[0, 3]])},
        {"model": (TokenBlock(1, 1),)},
    )
)
MAKERS = {
    "tree": lambda: TreeWidget(nn.Sequential(nn.Linear(2, 2))),
    "difference": lambda: TreeWidget(nn.Linear(2, 2), after=nn.Linear(2, 3)),
    "routing": lambda: RoutingWidget(TRACE, TRACE),
    "form": lambda: PatchForm(namespace={}),
    "laboratory": lambda: Lab(nn.Sequential(nn.Linear(2, 2)), namespace={}),
    "laboratory without a model": lambda: Lab(None, namespace={}),
}


def alive():
    gc.collect()
    return sum(issubclass(type(made), Widget) for made in gc.get_objects())


@pytest.mark.parametrize("kind", MAKERS)
def test_closed_widget_is_gone_with_all_that_was_made_for_it(kind):
    MAKERS[kind]().close()  # What ipywidgets makes once for all.
    before = alive()

    widget = MAKERS[kind]()
    gone = weakref.ref(widget)
    widget.close()
    del widget

    assert alive() == before
    assert gone() is None


def test_open_widget_stays():
    """Guards the test above: ipywidgets keeps what is open."""
    before = alive()
    widget = MAKERS["tree"]()
    kept = weakref.ref(widget)
    del widget

    assert alive() > before
    kept().close()
