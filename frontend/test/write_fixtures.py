"""Writes what the JavaScript tests read: the traits of real widgets, made from toy models.

Run it after the payload has changed: `python frontend/test/write_fixtures.py`. A test in
tests/notebook fails while the files are not what this writes.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchlab.notebook.tree_widget import TreeWidget
from patchlab.plan.findings import Finding

FOLDER = Path(__file__).parent / "fixtures"
TRAITS = (
    *("payload", "highlight", "selected", "query", "regex", "tab", "changes_only", "fold_equal"),
    *("details", "verdict", "findings", "error"),
)


def _toy(name: str, **children: nn.Module) -> nn.Module:
    # The same Python module however this file is run, so that the bytes are the same.
    cls = _CLASSES.setdefault(name, type(name, (nn.Module,), {"__module__": "toys"}))
    module = cls()
    for child, value in children.items():
        module.add_module(child, value)
    return module


_CLASSES: dict[str, type[nn.Module]] = {}


def _layer(inner: str) -> nn.Module:
    added = {"scale": _toy("Scale", factor=nn.Identity())} if inner == "FastAttention" else {}
    return _toy(
        "Layer",
        attention=_toy(
            "Attention",
            **{"self": _toy(inner, query=nn.Linear(4, 4), key=nn.Linear(4, 4), **added)},
            output=_toy("Output", dense=nn.Linear(4, 4)),
        ),
        norm=nn.LayerNorm(4),
    )


def _model(inner: tuple[str, ...]) -> nn.Module:
    model = _toy("Model", embed=nn.Embedding(1000, 4))
    model.add_module("layers", nn.ModuleList([_layer(name) for name in inner]))
    return model


def fixtures() -> dict[str, dict[str, Any]]:
    """Return file stem → traits."""
    torch.manual_seed(0)
    before = _model(("SelfAttention",) * 4)
    after = _model(("FastAttention", "SelfAttention", "FastAttention", "FastAttention"))
    after.layers[1].norm = nn.LayerNorm(4, bias=False)
    after.add_module("head", nn.Linear(4, 2))
    del after.embed

    odd = _toy("Odd", **{"<img src=x onerror=alert(1)>": nn.Linear(2, 2), "层": nn.LazyLinear(3)})
    odd.add_module("twice", odd.get_submodule("<img src=x onerror=alert(1)>"))
    odd.add_module("me", odd)
    odd.add_module("head", nn.Linear(2, 2, bias=False))
    odd.head.weight = odd.twice.weight

    tree = TreeWidget(
        before,
        findings=[
            Finding("PL101", "error", ".*Attention", "Attention", "Attention holds one.", "^Self"),
            Finding("PL104", "warning", "x", "", "x replaces nothing."),
        ],
        verdict="**8 modules** replaced by 1 rule in **Model**",
    )
    marks = {}
    for layer in range(4):
        marks[f"layers.{layer}.attention"] = "container"
        for inner in ("self", "self.query", "self.key", "output", "output.dense"):
            marks[f"layers.{layer}.attention.{inner}"] = "swallowed"
    tree.set_highlight(marks, reasons={"layers.0.attention": "'.*Attention' decides it."})
    tree.selected = "layers.0.attention"
    widgets = {"tree": tree, "diff": TreeWidget(before, after=after), "odd": TreeWidget(odd)}
    return {name: _traits(widget) for name, widget in widgets.items()}


def _traits(widget: TreeWidget) -> dict[str, Any]:
    values = {name: getattr(widget, name) for name in TRAITS}
    return {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in values.items()
    }


def texts() -> dict[str, str]:
    """Return file name → content."""
    return {
        f"{name}.json": json.dumps(traits, indent=1, ensure_ascii=False) + "\n"
        for name, traits in fixtures().items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in texts().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
