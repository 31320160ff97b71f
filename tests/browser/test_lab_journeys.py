"""A person at the laboratory, in a real JupyterLab: what is clicked is what the kernel has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

# A kernel that starts on a busy machine takes its time.
expect.set_options(timeout=30_000)

AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
NARROW = "^Bert(?:Cross|Self)Attention$"
SETUP = """%load_ext patchlab
import patchlab
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention

class MyAttention(BertSelfAttention):
    pass

config = BertConfig(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8, vocab_size=20
)
model = BertModel(config)
"""
PANEL = "panel = patchlab.lab(model)\npanel"
AGAIN = "panel = patchlab.lab(model)\nkept = globals().get('kept', []) + [panel]\npanel"
FORM = "form = patchlab.patch_form()\nform"
PATCHED = "%%patched --diff\nother = BertModel(config)"
RULES = "{key: cls.__name__ for key, cls in patchlab.get_patch_mapping().items()}"
SWAPPED = "sum(type(m).__name__ == 'MyAttention' for m in model.modules())"


def key(lab, cell=1):
    return lab.output(cell).get_by_role("textbox", name=re.compile("^Key"))


def replacement(lab, cell=1):
    return lab.output(cell).get_by_label("Replacement")


def button(lab, name, cell=1):
    return lab.output(cell).get_by_role("button", name=name, exact=True)


def row(lab, name, cell=1):
    return lab.output(cell).get_by_role("treeitem", name=re.compile(f"^{re.escape(name)},"))


def axe_violations(lab, selector):
    assert AXE.exists(), "axe-core is missing: run `npm ci` in frontend/."
    lab.page.add_script_tag(content=AXE.read_text())
    found = lab.page.evaluate(
        "selector => axe.run(selector).then(result => result.violations.map(violation => "
        "[violation.id, violation.nodes.map(node => node.html + node.failureSummary)]))",
        selector,
    )
    return [json.dumps(violation, indent=1) for violation in found]


def test_key_is_typed_narrowed_registered_applied_to_a_cell_and_taken_back(lab):
    lab.open([SETUP, PANEL, PATCHED])
    lab.page.locator(".jp-Notebook .jp-Cell").nth(2).click()
    lab.command("notebook:run-all-above")
    key(lab).press_sequentially(".*Attention")
    expect(row(lab, "attention").first).to_contain_text("container")
    expect(row(lab, "self").first).to_contain_text("swallowed")
    expect(lab.output(1)).to_contain_text("6 modules matched in BertModel")
    replacement(lab).fill("MyAttention · __main__")
    button(lab, f"Use {NARROW}").click()
    expect(key(lab)).to_have_value(NARROW)
    expect(lab.output(1)).to_contain_text("3 modules replaced by 1 rule")
    expect(row(lab, "self").first).to_contain_text("replaced")
    button(lab, "Register").click()
    lab.expect_kernel(RULES, f"{{'{NARROW}': 'MyAttention'}}")
    assert lab.ask("patchlab.status().entries[0].by") == "'form'"

    lab.page.locator(".jp-Notebook .jp-Cell").nth(2).click()
    lab.command("notebook:run-cell")
    expect(lab.output(2)).to_contain_text("3 × BertSelfAttention → MyAttention")
    expect(row(lab, "self", 2).first).to_contain_text("replaced")
    assert lab.ask(SWAPPED.replace("model.", "other.")) == "3"
    button(lab, "Unregister").click()
    lab.expect_kernel(RULES, "{}")
    expect(lab.output(1)).to_contain_text("Nothing is registered.")
    assert lab.errors == []


def test_error_is_shown_in_the_form_and_the_registry_stays(lab):
    lab.open([SETUP, FORM]).run_all()
    key(lab).fill("LlamaMLP")
    replacement(lab).fill("no.such.Class")
    button(lab, "Register").click()

    expect(lab.output(1).get_by_role("alert")).to_contain_text("there is no 'no' in this notebook")
    assert lab.ask("patchlab.get_patch_mapping()") == "{}"
    assert "no.such.Class" in lab.ask("form.error")
    key(lab).fill("Bert(")
    expect(lab.output(1)).to_contain_text("not a valid regular expression")
    assert lab.errors == []


def test_model_is_swapped_and_swapped_back_in_two_views_of_one_panel(lab):
    lab.open([SETUP, PANEL, "panel"]).run_all()
    key(lab).fill("BertSelfAttention")
    expect(key(lab, 2)).to_have_value("BertSelfAttention")
    replacement(lab, 2).fill("MyAttention · __main__")
    for cell in (1, 2):
        expect(lab.output(cell)).to_contain_text("3 modules replaced by 1 rule")
    button(lab, "Apply to this model", 2).click()
    lab.expect_kernel(SWAPPED, "3")
    for cell in (1, 2):
        expect(lab.output(cell)).to_contain_text("3 modules replaced in BertModel, until Undo")
    button(lab, "Undo", 1).click()
    lab.expect_kernel(SWAPPED, "0")
    for cell in (1, 2):
        expect(button(lab, "Undo", cell)).to_be_disabled()
    assert lab.errors == []


def test_panel_is_used_with_the_keyboard_alone(lab):
    lab.open([SETUP, PANEL]).run_all()
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    key(lab).focus()
    keyboard = lab.page.keyboard
    keyboard.type(".*Attention")
    keyboard.press("Tab")
    keyboard.type("MyAttention")
    expect(lab.output(1)).to_contain_text("6 modules replaced by 1 rule")
    focused = "() => document.activeElement.textContent"
    for _ in range(12):
        keyboard.press("Tab")
        if lab.page.evaluate(focused) == f"Use {NARROW}":
            break
    keyboard.press("Enter")
    lab.expect_kernel("panel.form.key.value", repr(NARROW))
    key(lab).focus()
    for _ in range(3):
        keyboard.press("Tab")
    assert lab.page.evaluate(focused) == "Register"
    # "a" and "b" would insert cells if JupyterLab's command mode saw them.
    keyboard.press("b")
    keyboard.press("a")
    keyboard.press("Space")
    lab.expect_kernel(RULES, f"{{'{NARROW}': 'MyAttention'}}")
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == cells
    assert lab.errors == []


def test_panel_and_form_have_no_accessibility_violation_in_both_themes_wide_and_narrow(lab):
    lab.open([SETUP, PANEL, FORM]).run_all()
    lab.page.set_viewport_size({"width": 1280, "height": 2400})
    key(lab).fill(".*Attention")
    replacement(lab).fill("MyAttention · __main__")
    button(lab, "Register").click()
    expect(button(lab, "Unregister")).to_be_visible()
    replacement(lab, 2).fill("nothing")
    button(lab, "Register", 2).click()
    expect(lab.output(2).get_by_role("alert")).to_be_visible()
    tree, form = (lab.output(1).locator(f".patchlab-{name}") for name in ("tree", "form"))
    assert tree.bounding_box()["y"] == pytest.approx(form.bounding_box()["y"], abs=2)
    buttons = [button(lab, name) for name in ("Register", "Apply to this model", "Undo")]
    assert len({place.bounding_box()["y"] for place in buttons}) == 1
    expect(lab.output(1).get_by_role("status").first).to_contain_text("6 modules replaced")

    assert axe_violations(lab, ".patchlab-lab, .patchlab-form") == []
    lab.theme("JupyterLab Dark")
    assert axe_violations(lab, ".patchlab-lab, .patchlab-form") == []
    lab.page.set_viewport_size({"width": 700, "height": 2400})
    lab.page.wait_for_function(
        "() => document.querySelector('.patchlab-lab .patchlab-form').getBoundingClientRect().top"
        " > document.querySelector('.patchlab-lab .patchlab-tree').getBoundingClientRect().bottom"
        " - 2"
    )
    assert axe_violations(lab, ".patchlab-lab, .patchlab-form") == []
    assert lab.errors == []


def test_copied_code_is_in_the_clipboard_and_registers_the_same(lab):
    lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    lab.open([SETUP, FORM]).run_all()
    key(lab).fill("BertSelfAttention")
    replacement(lab).fill("MyAttention · __main__")
    lab.expect_kernel("bool(form.copy.code)", "True")
    lab.output(1).get_by_role("button", name="Copy as code").click()
    expect(lab.output(1).get_by_role("button", name="Copied")).to_be_visible()

    code = lab.page.evaluate("() => navigator.clipboard.readText()")
    assert code == "patchlab.register_patch_mapping({'BertSelfAttention': MyAttention})"
    expect(lab.output(1).locator(".code")).to_have_text(code)
    lab.ask(code)
    assert lab.ask(RULES) == "{'BertSelfAttention': 'MyAttention'}"
    lab.ask("form.refresh()")
    expect(button(lab, "Unregister")).to_be_visible()


def test_panel_whose_cell_runs_again_stops_following(lab):
    lab.open([SETUP, AGAIN]).run_all()
    lab.run_all()
    lab.expect_kernel("kept[0].copy.was_closed, kept[1].copy.was_closed", "(True, False)")
