"""Measure the tree widget in a real JupyterLab: `python -m benchmarks.bench_widget`.

A headless Chromium opens a notebook, runs the cell that shows the tree, and then expands, filters
and scrolls it. Times are medians of several rounds in milliseconds; a frame of 60 Hz, 17 ms, is the
least that a time in the browser can be. Python's side is given as a ratio to `str(model)`, since a
loaded machine slows both. Targets: shown within 1 s, at most 300 elements, under 40 kB of code.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.report import write_json
from tests.browser.conftest import CHROMIUM_ARGS, find_chromium
from tests.browser.driven_lab import Lab, Server

ROUNDS = 5
MODEL = """
import time, torch
from torch import nn
import patchlab.notebook.tree_widget as tree_widget

# A hundred submodules a layer; siblings differ, so that little can be folded.
def build(modules):
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList()
        while modules > 100:
            layer = nn.Module()
            layer.experts = nn.ModuleList(
                nn.Linear(4, 4 + (modules // 100 + j) % 7) for j in range(97)
            )
            layer.gate = nn.Linear(4, modules)
            model.layers.append(layer)
            modules -= 100
    return model

def timed(work):
    start = time.perf_counter()
    result = work()
    return (time.perf_counter() - start) * 1000, result

model = build({modules})
"""
PYTHON = """
prints = sorted(timed(lambda: str(model))[0] for _ in range(3))
makes = sorted(timed(lambda: tree_widget.TreeWidget(model))[0] for _ in range(3))
"""
SHOW = "widget = tree_widget.TreeWidget(model)\nwidget"

# Each waits for the frame after the work, so that what is timed has been painted.
FRAME = "const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));"
CLICKED = f"""async (selector) => {{ {FRAME}
  const button = document.querySelector(selector);
  await frame();
  const start = performance.now();
  button.click();
  await frame();
  return performance.now() - start;
}}"""
SHOWN = """async () => {
  const start = performance.now();
  const run = window.jupyterapp.commands.execute('notebook:run-cell');
  while (!document.querySelector('.patchlab-tree [role=treeitem]')) {
    await new Promise((done) => requestAnimationFrame(done));
  }
  const time = performance.now() - start;
  await run;
  return time;
}"""
FILTERED = f"""async (query) => {{ {FRAME}
  const input = document.querySelector('.patchlab-tree input');
  const count = document.querySelector('.patchlab-tree .count');
  const before = count.textContent;
  const start = performance.now();
  input.value = query;
  input.dispatchEvent(new Event('input'));
  while (count.textContent === before) await frame();
  return performance.now() - start;
}}"""
SCROLLED = """async () => {
  const root = document.querySelector('.patchlab-tree');
  const scroller = root.querySelector('.scroller');
  const times = [];
  let most = 0;
  for (let step = 0; step < 120; step++) {
    const start = performance.now();
    scroller.scrollTop = (scroller.scrollHeight * ((step * 37) % 120)) / 120 + step * 90;
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - start);
    most = Math.max(most, root.querySelectorAll('*').length);
  }
  times.sort((a, b) => a - b);
  return [times[Math.floor(times.length * 0.95)], most];
}"""


def measure(lab: Lab, modules: int) -> dict[str, float]:
    """Measure one size and return figure → value."""
    lab.open([MODEL.replace("{modules}", str(modules)), PYTHON, SHOW])
    for _ in range(2):
        lab.command("notebook:run-cell-and-select-next")
    shown = []
    for _ in range(ROUNDS):
        lab.command("notebook:clear-cell-output")
        shown.append(lab.page.evaluate(SHOWN))
    kernel = {name: float(lab.ask(name)) for name in ("prints[1]", "makes[1]")}
    clicks = {"expand": [], "unfold": []}
    for _ in range(ROUNDS):
        clicks["expand"].append(lab.page.evaluate(CLICKED, ".patchlab-tree [title='Expand all']"))
        lab.page.evaluate(CLICKED, ".patchlab-tree [title='Collapse all']")
    lab.page.evaluate(CLICKED, ".patchlab-tree [title='Expand all']")
    clicks["unfold"].append(
        lab.page.evaluate(CLICKED, ".patchlab-tree .switch[title^='Show equal']")
    )
    filtered = []
    for query in ("gate", "experts.7", "Linear", "layers.1.", "no such module"):
        filtered.append(lab.page.evaluate(FILTERED, query))
        time.sleep(0.3)
    lab.page.evaluate(FILTERED, "")
    scroll, elements = lab.page.evaluate(SCROLLED)
    return {
        "modules": float(lab.ask("len(widget._fqns)")),
        "Python side, ratio to str(model)": kernel["makes[1]"] / kernel["prints[1]"],
        "Python side, ms": kernel["makes[1]"],
        "run cell to rows on the screen, ms": statistics.median(shown),
        "expand all, ms": statistics.median(clicks["expand"]),
        "unfold all, ms": clicks["unfold"][0],
        "filter, with 90 ms wait for typing, ms": statistics.median(filtered),
        "scroll frame, 95th percentile, ms": scroll,
        "elements at most": elements,
        "payload, bytes": float(lab.ask("len(widget.payload)")),
        "payload, bytes compressed": float(
            lab.ask("len(__import__('zlib').compress(widget.payload))")
        ),
        "code, bytes": float(lab.ask("len(str(widget._esm)) + len(str(widget._css))")),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", type=int, nargs="*", default=[1_200, 50_000])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = Server(Path(tempfile.mkdtemp()))
    results = []
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=find_chromium(), args=CHROMIUM_ARGS
            )
            for size in options.modules:
                lab = Lab(browser.new_page(viewport={"width": 1280, "height": 900}), server)
                results.append(measure(lab, size))
                lab.page.close()
                server.end_sessions()
    finally:
        server.stop()
    for figure in results[0]:
        print(f"{figure:44}", *(f"{result[figure]:>12,.1f}" for result in results))
    if options.json:
        write_json("widget", [], {f"{result['modules']:.0f} modules": result for result in results})


if __name__ == "__main__":
    main()
