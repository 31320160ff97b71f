"""The tree widget in a real JupyterLab: seen, typed at, moved from Python, checked with axe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

# A kernel that starts on a busy machine takes its time.
expect.set_options(timeout=30_000)

AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"

# Shaped like BERT, but quick to import: most of these tests would wait for transformers else.
MODELS = """
import torch
from torch import nn
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.plan.findings import Finding

class MyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

CLASSES = {}

def module(name, **children):
    cls = CLASSES.setdefault(name, type(name, (nn.Module,), {"__module__": "bert"}))
    made = cls()
    for child, value in children.items():
        made.add_module(child, value)
    return made

def layer(attention):
    output = module("BertSelfOutput", dense=nn.Linear(32, 32), LayerNorm=nn.LayerNorm(32))
    return module(
        "BertLayer",
        attention=module("BertAttention", self=attention, output=output),
        intermediate=module("BertIntermediate", dense=nn.Linear(32, 64)),
        output=module("BertOutput", dense=nn.Linear(64, 32), LayerNorm=nn.LayerNorm(32)),
    )

def bert(attention):
    return module(
        "BertModel",
        embeddings=module(
            "BertEmbeddings", words=nn.Embedding(1000, 32), LayerNorm=nn.LayerNorm(32)
        ),
        encoder=module(
            "BertEncoder", layer=nn.ModuleList(layer(attention()) for _ in range(4))
        ),
        pooler=module("BertPooler", dense=nn.Linear(32, 32)),
    )

def self_attention():
    names = ("query", "key", "value")
    return module("BertSelfAttention", **{name: nn.Linear(32, 32) for name in names})

before, after = bert(self_attention), bert(MyAttention)
"""

PREVIEW = """
w = TreeWidget(
    before,
    findings=[
        Finding("PL101", "error", ".*Attention", "BertAttention",
                "BertAttention holds BertSelfAttention: replacing both drops the inner one.",
                "^Bert(?:Cross|Self)Attention$"),
        Finding("PL201", "warning", ".*Attention", "BertSelfAttention",
                "Built with (config, is_causal=…); MyAttention takes none."),
    ],
    verdict="**8 modules** would be replaced by 1 rule in **BertModel**",
)
marks = {}
for name, module in before.named_modules():
    if type(module).__name__ == "BertAttention":
        marks[name] = "container"
    elif ".attention." in name:
        marks[name] = "swallowed"
w.set_highlight(marks)
w
"""

DIFF = "d = TreeWidget(before, after=after)\nd"

LARGE = """
with torch.device("meta"):
    big = nn.Module()
    big.layers = nn.ModuleList()
    for i in range(500):
        layer = nn.Module()
        layer.experts = nn.ModuleList(nn.Linear(4, 4 + (i + j) % 7) for j in range(97))
        layer.gate = nn.Linear(4, i + 1)
        big.layers.append(layer)
w = TreeWidget(big)
w
"""


def tree(lab, cell=1):
    return lab.output(cell).locator(".patchlab-tree")


def row(lab, name, cell=1):
    return tree(lab, cell).get_by_role("treeitem", name=re.compile(f"^{re.escape(name)},"))


def focused(lab):
    return lab.page.evaluate("() => document.activeElement.querySelector('.label')?.textContent")


@pytest.fixture
def axe_violations(lab):
    assert AXE.exists(), "axe-core is missing: run `npm ci` in frontend/."

    def run(selector=".patchlab-tree"):
        lab.page.add_script_tag(content=AXE.read_text())
        found = lab.page.evaluate(
            "selector => axe.run(selector).then(result => result.violations.map(violation => "
            "[violation.id, violation.nodes.map(node => node.html + node.failureSummary)]))",
            selector,
        )
        return [json.dumps(violation, indent=1) for violation in found]

    return run


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("width", [1280, 700])
def test_views_have_no_accessibility_violation(lab, axe_violations, theme, width):
    lab.page.set_viewport_size({"width": width, "height": 1600})
    lab.open([MODELS, PREVIEW, DIFF]).run_all()
    lab.theme(theme)
    expect(tree(lab, 1)).to_be_visible()
    row(lab, "attention").click()
    row(lab, "self", 2).click()
    tree(lab, 2).get_by_label("Search").fill("output")
    expect(tree(lab, 2).get_by_text("of 68 modules")).to_be_visible()
    lab.expect_kernel("d.details.get('fqn')", "'encoder.layer.0.attention.self'")

    assert axe_violations() == []
    assert lab.errors == []


def test_axe_finds_what_is_wrong(lab, axe_violations):
    """Guards the test above, which would pass if axe were not at work."""
    lab.open([MODELS, DIFF]).run_all()
    expect(tree(lab)).to_be_visible()
    lab.page.evaluate(
        "() => { const b = document.querySelector('.patchlab-tree .tool');"
        " b.removeAttribute('aria-label'); b.removeAttribute('title') }"
    )

    assert "button-name" in "".join(axe_violations())


def test_tree_is_used_with_the_keyboard_alone(lab):
    lab.open([MODELS, DIFF]).run_all()
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    tree(lab).get_by_role("tab", selected=True).focus()

    lab.page.keyboard.press("ArrowLeft")
    lab.expect_kernel("d.tab", "'after'")
    lab.page.keyboard.press("End")
    lab.expect_kernel("d.tab", "'diff'")
    while not focused(lab):
        lab.page.keyboard.press("Tab")
    # "a" and "b" would insert cells if JupyterLab's command mode saw them.
    for key in ["Home", "e", "b", "a", "End", "Home", "ArrowDown", "ArrowDown", "ArrowRight"]:
        lab.page.keyboard.press(key)
    assert focused(lab) == "layer"
    lab.expect_kernel("d.selected", "'encoder.layer'")
    lab.page.keyboard.press("/")
    lab.page.keyboard.type("self")
    lab.page.keyboard.press("Enter")
    assert focused(lab) == "self"
    lab.expect_kernel("(d.query, d.selected)", "('self', 'encoder.layer.0.attention.self')")
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == cells
    assert lab.errors == []


def test_two_views_and_python_agree(lab):
    lab.open([MODELS, DIFF, "d"]).run_all()
    expect(tree(lab, 2)).to_be_visible()
    lab.ask("d.set_trait('selected', 'encoder.layer.2.attention.output.dense')")
    for cell in (1, 2):
        selected = tree(lab, cell).locator('.row[aria-selected="true"]')
        expect(selected).to_have_attribute("aria-label", "dense, Linear, 1.06 k parameters")
        expect(tree(lab, cell).locator(".details")).to_contain_text("32 × 32")
    tree(lab, 2).locator(".scroller").evaluate("node => { node.scrollTop = node.scrollHeight }")
    row(lab, "pooler", 2).click()
    lab.expect_kernel("d.selected", "'pooler'")
    expect(tree(lab, 1).locator(".details")).to_contain_text("BertPooler")
    lab.ask("d.set_trait('query', 'layernorm')")
    for cell in (1, 2):
        expect(tree(lab, cell).get_by_text("9 of 68 modules")).to_be_visible()
    assert lab.errors == []


def test_error_in_the_browser_comes_back_to_python(lab):
    lab.open([MODELS, DIFF]).run_all()
    expect(tree(lab)).to_be_visible()
    lab.ask("d.set_trait('highlight', b'12345678')")
    expect(tree(lab).get_by_role("alert")).to_contain_text("the marks do not fit the tree")
    lab.expect_kernel("len(d.errors)", "1")
    assert "marks" in lab.ask("d.errors[0]")


def test_suggestion_reaches_its_callback_and_its_error_is_shown(lab):
    lab.open([MODELS, PREVIEW]).run_all()
    lab.ask("w.on_suggestion(lambda key: {}[key])")
    tree(lab).get_by_role("button", name="Use ^Bert").first.click()
    expect(tree(lab).get_by_role("alert")).to_contain_text("KeyError: '^Bert(?:Cross|Self)")


def test_highlight_follows_the_key_and_is_told_in_words(lab):
    lab.open([MODELS, PREVIEW]).run_all()
    expect(row(lab, "attention")).to_contain_text("container")
    struck = row(lab, "self").locator(".label")
    expect(row(lab, "self")).to_contain_text("swallowed")
    line = "node => getComputedStyle(node).textDecorationLine"
    assert struck.evaluate(line) == "line-through"
    lab.ask("w.set_highlight({f'encoder.layer.{i}.attention.self': 'pattern' for i in range(4)})")
    expect(row(lab, "self")).to_contain_text("pattern match")
    assert struck.evaluate(line) == "none"
    lab.ask("w.set_highlight(None)")
    expect(row(lab, "self")).not_to_contain_text("pattern match")


def test_fifty_thousand_modules_are_scrolled_and_filtered_with_few_elements(lab):
    lab.open([MODELS, LARGE]).run_all()
    expect(tree(lab).locator(".count")).to_have_text("50,002 modules")
    tree(lab).get_by_role("button", name="Expand all").click()
    tree(lab).get_by_role("switch", name="fold equal").click()
    scroller = tree(lab).locator(".scroller")
    height = scroller.evaluate("node => node.scrollHeight")
    assert height == pytest.approx(50_002 * 24 + 24, abs=8)
    count = "node => node.querySelectorAll('*').length"
    most = 0
    for part in (0.1, 0.5, 0.9, 1.0, 0.3):
        scroller.evaluate("(node, part) => { node.scrollTop = node.scrollHeight * part }", part)
        lab.page.wait_for_timeout(100)
        most = max(most, tree(lab).evaluate(count))
    assert most <= 300
    tree(lab).get_by_label("Search").fill("layers.499.gate")
    expect(tree(lab).get_by_text("1 of 50,002 modules")).to_be_visible()
    expect(row(lab, "gate")).to_have_attribute("aria-level", "4")
    assert lab.errors == []


def test_reader_without_a_kernel_sees_the_static_tree(lab):
    lab.open([MODELS, DIFF]).run_all()
    expect(tree(lab)).to_be_visible()
    saved = lab.save()
    data = saved["cells"][1]["outputs"][0]["data"]
    assert "MyAttention" in data["text/html"]
    assert "MyAttention" in data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data


@pytest.mark.parametrize("trusted", [False, True])
def test_notebook_that_is_opened_again_keeps_its_tree(lab, trusted):
    """Without its kernel, as on Binder: the twin is shown, and is in the file in any case."""
    lab.open([MODELS, DIFF]).run_all()
    expect(tree(lab)).to_be_visible()
    saved = lab.save()
    lab.server.end_sessions()
    cells = [cell for cell in saved["cells"] if cell["cell_type"] == "code"]
    lab.server.write("again.ipynb", [*cells, "# not the file that was signed"])
    if trusted:
        lab.server.trust("again.ipynb")
    lab.open("again.ipynb")

    kept = json.loads((lab.server.root / "again.ipynb").read_text())["cells"][1]["outputs"][0]
    assert "MyAttention" in "".join(kept["data"]["text/html"])
    if not trusted:
        # A trusted one prefers the widget, whose model went with the kernel, until the cell runs.
        expect(lab.output(1)).to_contain_text("MyAttention")
    lab.run_all()
    expect(tree(lab)).to_be_visible()


def test_loaded_extension_shows_trees_and_differences_as_widgets(lab):
    value = "import patchlab\npatchlab.diff_trees(before, after)"
    lab.open([MODELS, value, "%load_ext patchlab", "patchlab.module_tree(before)"]).run_all()
    expect(tree(lab, 3)).to_be_visible()
    expect(lab.output(1)).to_contain_text("MyAttention")
    assert tree(lab, 1).count() == 0
