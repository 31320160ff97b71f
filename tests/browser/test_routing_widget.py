"""The routing widget in a real JupyterLab: a trace is shown, walked through, and opened again."""

from __future__ import annotations

import json
import time
from pathlib import Path

from playwright.sync_api import expect

expect.set_options(timeout=30_000)

AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"

# Traces as they are recorded, without the model: most of these tests would wait for transformers.
TRACES = """
import torch
from patchlab.routing.trace import Router, Routes, RoutingTrace, TokenBlock

class Tokenizer:
    def convert_ids_to_tokens(self, ids):
        return ["<b>bold</b>", "two"] * (len(ids) // 2)

def recorded(seed):
    random = torch.Generator().manual_seed(seed)
    fqns = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2, 3)]
    indices = {fqn: torch.rand(12, 7, generator=random).topk(2).indices for fqn in fqns}
    routers = tuple(Router(fqn, layer + 1, 8, 2, "model") for layer, fqn in enumerate(fqns))
    blocks = {"model": (TokenBlock(2, 6),)}
    return RoutingTrace(Routes(routers, indices, blocks, "toy_moe", 4))

trace, other, ids = recorded(0), recorded(1), torch.arange(12)
"""

WIDGET = """
from patchlab.notebook.routing_widget import RoutingWidget
w = RoutingWidget(trace, other, token_ids=ids, tokenizer=Tokenizer())
w
"""


def widget(lab, cell=1):
    return lab.output(cell).locator(".patchlab-routing")


def canvas(lab):
    return widget(lab).locator("canvas")


def status(lab):
    return widget(lab).locator(".status")


def pixels(lab):
    """Read the canvas, one 32-bit color for each pixel."""
    return canvas(lab).evaluate(
        "node => [...new Uint32Array(node.getContext('2d')"
        ".getImageData(0, 0, node.width, node.height).data.buffer)]"
    )


def test_trace_is_shown_as_a_widget_and_by_its_twin_when_opened_again(lab):
    lab.open([TRACES, "%load_ext patchlab\ntrace"]).run_all()

    expect(widget(lab)).to_contain_text("12 tokens in 2 sequences · 3 routers, 1 dense layer")
    expect(status(lab)).to_contain_text("layer 1, expert 0:")
    assert len(set(pixels(lab))) > 3
    saved = lab.save()
    data = saved["cells"][1]["outputs"][0]["data"]
    assert "model.layers.1.mlp.gate" in data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data
    lab.server.end_sessions()
    cells = [cell for cell in saved["cells"] if cell["cell_type"] == "code"]
    lab.server.write("again.ipynb", [*cells, "# not the file that was signed"])
    lab.open("again.ipynb")

    expect(lab.output(1)).to_contain_text("model.layers.1.mlp.gate")
    assert widget(lab).count() == 0
    assert lab.errors == []


def test_routes_are_walked_with_keys_with_the_mouse_and_from_python(lab):
    lab.open([TRACES, WIDGET]).run_all()
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    widget(lab).get_by_role("tab", name="Load").focus()

    lab.page.keyboard.press("ArrowRight")
    lab.expect_kernel("w.view", "'tokens'")
    expect(widget(lab).get_by_role("tab", name="Tokens")).to_be_focused()
    lab.page.keyboard.press("Tab")
    expect(canvas(lab)).to_be_focused()
    # "a" and "b" would insert cells if JupyterLab's command mode saw them.
    for key in ["End", "ArrowDown", "ArrowLeft"]:
        lab.page.keyboard.press(key)
    lab.expect_kernel("w.cell", "(1, 10)")
    expect(status(lab)).to_contain_text("layer 2, token 10 “<b>bold</b>”:")
    assert widget(lab).locator("b").count() == 0
    lab.page.keyboard.press("Shift+Tab")
    lab.page.keyboard.press("End")
    lab.expect_kernel("w.view", "'divergence'")
    expect(status(lab)).to_contain_text("in the other trace")
    box = canvas(lab).bounding_box()
    canvas(lab).click(position={"x": box["width"] - 4, "y": 4})
    lab.expect_kernel("w.cell", "(0, 11)")
    lab.ask("w.set_trait('cell', (2, 3))")
    expect(status(lab)).to_contain_text("layer 3, token 3 “two”")
    lab.ask("w.set_trait('experts', b'123')")
    expect(widget(lab).get_by_role("alert")).to_contain_text("do not fit its tokens")
    lab.expect_kernel("len(w.errors)", "1")
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == cells
    assert lab.errors == []


def test_views_are_accessible_and_drawn_anew_in_both_themes(lab):
    lab.open([TRACES, WIDGET]).run_all()
    expect(widget(lab)).to_be_visible()
    lab.page.add_script_tag(content=AXE.read_text())
    lab.theme("JupyterLab Light")  # the server keeps the theme of the last test
    lab.ask("w.set_trait('cell', (2, 3))")
    expect(status(lab)).to_contain_text("layer 3")
    light = pixels(lab)
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        lab.theme(theme)
        for view in ("tokens", "divergence", "load"):
            lab.ask(f"w.set_trait('view', {view!r})")
            expect(widget(lab).get_by_role("tab", selected=True)).to_have_text(view.capitalize())
            found = lab.page.evaluate(
                "() => axe.run('.patchlab-routing').then(result => result.violations)"
            )
            assert found == [], json.dumps(found)[:2000]

    assert len(pixels(lab)) == len(light)
    assert pixels(lab) != light

    lab.theme("JupyterLab Light")
    until = time.monotonic() + 10
    while pixels(lab) != light and time.monotonic() < until:
        lab.page.wait_for_timeout(50)
    assert pixels(lab) == light
