"""The form without a front end: every handler is a method that raises, and a click that shows."""

from __future__ import annotations

import html
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import monkey_patching

import patchlab
from patchlab.errors import MappingError
from patchlab.mapping.registry import OTHERS, registered_entries, registry_state
from patchlab.notebook.form_rows import MOST_FINDINGS, finding_cards
from patchlab.notebook.form_state import Step, undo_step
from patchlab.notebook.form_style import FITS, finding_html
from patchlab.notebook.forms import PatchForm
from patchlab.plan.findings import Finding
from tests.toys import CountingAttention, OtherMLP, SubMLP

NARROW = "^Bert(?:Cross|Self)Attention$"


@pytest.fixture
def namespace():
    return {"MyMLP": SubMLP, "Other": OtherMLP, "MyAttention": CountingAttention, "nn": nn}


@pytest.fixture
def form(namespace):
    made = PatchForm(namespace=namespace)
    yield made
    made.close()
    patchlab.clear_patch_mapping()


def texts(widget):
    """Return every text that a widget or one of its children shows."""
    found = [getattr(widget, name, "") for name in ("value", "description")]
    for child in getattr(widget, "children", ()):
        found += texts(child)
    return [text for text in found if isinstance(text, str)]


def buttons(widget, name):
    found = [widget] if getattr(widget, "description", None) == name else []
    for child in getattr(widget, "children", ()):
        found += buttons(child, name)
    return found


def test_unknown_class_is_told_in_the_form_and_nothing_is_registered(form):
    form.key.value = "LlamaMLP"
    form.cls.value = "no.such.Class"
    form.button.click()

    assert "replacement 'no.such.Class': there is no 'no'" in form.error
    assert "no.such.Class" in form.message
    assert 'role="alert"' in form.message
    assert patchlab.get_patch_mapping() == {}
    with pytest.raises(MappingError, match="there is no 'no'"):
        form.register()


def test_registered_rule_is_in_the_registry_with_the_form_as_its_source(form):
    form.key.value, form.cls.value = "LlamaMLP", "MyMLP · tests.toys"
    form.button.click()

    assert form.error == ""
    assert monkey_patching.get_patch_mapping() == {"LlamaMLP": SubMLP}
    (entry,) = registered_entries()
    assert (entry.by, entry.is_ours) == ("form", True)
    assert "LlamaMLP → SubMLP" in " ".join(texts(form))


REFUSED = {
    "a glob": ("*MLP", "MyMLP", "glob"),
    "no key": ("", "MyMLP", "empty"),
    "no regular expression": ("Llama(", "MyMLP", "regular expression"),
    "no class": ("LlamaMLP", "", "no replacement class is chosen"),
    "no module class": ("LlamaMLP", "number", "must be a class"),
    "a module and no class": ("LlamaMLP", "nn", "must be a class"),
    "an attribute of an object": ("LlamaMLP", "number.real", "neither a Python module nor a class"),
    "a call": ("LlamaMLP", "nn.Linear()", "has no 'Linear()'"),
    "a taken key": ("BertLayer", "MyMLP", "already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_rule_changes_nothing_raises_and_is_shown_by_the_click(form, namespace, case):
    key, name, message = REFUSED[case]
    namespace["number"] = 3
    patchlab.register_patch_mapping({"BertLayer": OtherMLP})
    before = registry_state()
    form.key.value, form.cls.value = key, name

    with pytest.raises(MappingError) as raised:
        form.register()
    form.button.click()

    assert message in str(raised.value)
    assert form.error == str(raised.value)
    assert registry_state() == before


def test_overwrite_takes_a_key_that_is_taken(form):
    patchlab.register_patch_mapping({"LlamaMLP": OtherMLP})
    form.key.value, form.cls.value, form.overwrite.value = "LlamaMLP", "MyMLP", True
    code = form.to_code()
    form.register()

    assert patchlab.get_patch_mapping() == {"LlamaMLP": SubMLP}
    assert code == "patchlab.register_patch_mapping({'LlamaMLP': MyMLP}, overwrite=True)"


@pytest.mark.parametrize("key", ["LlamaMLP", r"^Llama\w+\"?'$", "nn.?"])
def test_code_does_what_the_button_does(form, namespace, key):
    form.key.value, form.cls.value = key, "MyMLP · tests.toys"
    code = form.to_code()
    form.register()
    by_button = patchlab.get_patch_mapping()
    form.undo()
    exec(code, {"patchlab": patchlab, **namespace})

    assert patchlab.get_patch_mapping() == by_button
    assert form.copy.code == code


def test_incomplete_form_has_no_code_and_says_why(form):
    form.key.value = "LlamaMLP"
    assert form.copy.code == ""
    with pytest.raises(MappingError, match="no replacement class is chosen"):
        form.to_code()
    form.copy.click()
    assert "no replacement class is chosen" in form.error
    form.cls.value = "MyMLP"
    assert form.error == ""
    form.copy.click()
    assert any("patchlab.register_patch_mapping" in text for text in texts(form))


def test_key_says_what_it_matches_everywhere(form):
    form.key.value = ".*Attention"
    kind, loaded, everywhere = form.answer.matches.split(" · ")

    assert kind == "pattern"
    assert int(loaded.split()[0]) >= 3
    found = patchlab.survey(".*Attention")
    assert everywhere == f"{len(found.rows)} classes in {len(found.model_types)} model types"
    form.key.value = "LlamaMLP"
    assert form.answer.matches.endswith("1 class in 1 model type")
    assert form.answer.matches.startswith("exact name")


def test_suggestion_for_the_loaded_architecture_is_taken(form):
    # Only BERT's own: by the end of a test run a hundred architectures are loaded.
    form.key.value = "^Bert.*Attention$"
    assert "PL101" in {finding.code for finding in form.findings}
    (button,) = buttons(form, f"Use {NARROW}")
    button.click()

    assert form.key.value == NARROW
    assert "PL101" not in {finding.code for finding in form.findings}
    with pytest.raises(MappingError, match="no finding suggests"):
        form.use_suggestion()


def test_bad_key_is_told_while_it_is_typed(form):
    form.key.value = "Llama("
    assert "not a valid regular expression" in form.answer.problem
    assert any("not a valid regular expression" in text for text in texts(form))
    form.key.value = "Llama(MLP|Attention)"
    assert form.answer.problem == ""


@pytest.mark.parametrize("key", ["LlamaMLP", "^(?:<b>|Bert|RoBERTa)(?:Cross|Self)Attention$"])
def test_key_that_its_field_cuts_is_shown_whole_below_it(form, key):
    form.key.value = key
    below = [text for text in texts(form) if "aria-hidden" in text and html.escape(key) in text]

    assert len(below) == (len(key) > FITS)


def test_unregister_removes_one_and_refuses_what_is_not_there(form):
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP, "BertLayer": OtherMLP})
    form.refresh()
    buttons(form, "Unregister")[0].click()

    assert patchlab.get_patch_mapping() == {"BertLayer": OtherMLP}
    with pytest.raises(MappingError, match="'LlamaMLP' is not registered"):
        form.unregister("LlamaMLP")


def test_clear_can_be_undone_with_order_and_provenance(form):
    with monkey_patching._monkey_patch_lock:
        monkey_patching._monkey_patch_mapping_cache["Foreign"] = OtherMLP
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP, "BertLayer": OtherMLP})
    before = registered_entries()
    form.clear()
    assert patchlab.get_patch_mapping() == {}
    patchlab.register_patch_mapping({"Later": SubMLP})
    buttons(form, "Undo clear")[0].click()

    assert registered_entries()[:3] == before
    assert [entry.key for entry in registered_entries()] == [e.key for e in before] + ["Later"]
    assert registered_entries()[0].by == OTHERS


def test_undo_with_nothing_to_undo_raises(form):
    with pytest.raises(MappingError, match="nothing to undo"):
        form.undo()


def test_undone_clear_brings_the_hook_back(form):
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    form.clear()
    assert not patchlab.status().hooked
    form.undo()
    assert patchlab.status().hooked


KEYS = st.sampled_from(["A", "B", "C"])
CHANGES = st.lists(st.tuples(KEYS, st.sampled_from([SubMLP, OtherMLP, None])), max_size=6)


@settings(max_examples=40)
@given(CHANGES, CHANGES)
def test_undoing_every_step_leads_back_to_the_start(first, changes):
    """For any registry and any changes of it, order and provenance included."""
    try:
        for key, cls in first:
            change_registry(key, cls)
        start, steps = registry_state(), []
        for key, cls in changes:
            before = registry_state()
            change_registry(key, cls)
            steps.append(Step("change", before, registry_state()))
        for step in reversed(steps):
            undo_step(step)

        assert registry_state() == start
        assert list(registry_state().entries) == list(start.entries)
    finally:
        patchlab.clear_patch_mapping()


def change_registry(key, cls):
    if cls is not None:
        patchlab.register_patch_mapping({key: cls}, overwrite=True)
    elif key in patchlab.get_patch_mapping():
        patchlab.unregister_patch_mapping(key)


def test_entries_of_others_are_shown_without_a_button(form):
    with monkey_patching._monkey_patch_lock:
        monkey_patching._monkey_patch_mapping_cache["Foreign"] = OtherMLP
    form.refresh()

    assert buttons(form, "Unregister") == []
    assert any("not ours" in text for text in texts(form))
    assert any(OTHERS in text for text in texts(form))


def test_names_are_shown_as_text_and_never_as_html(form, namespace):
    markup = "<img src=x onerror=alert(1)>"
    namespace[markup] = type(markup, (nn.Module,), {})
    form.key.value = f"LlamaMLP{markup}".replace(" ", "")
    form.cls.value = markup
    patchlab.register_patch_mapping({f"a{markup}".replace(" ", ""): namespace[markup]})
    form.refresh()
    form.button.click()

    shown = [*texts(form), form.to_html(), form.message]
    html = [text for text in shown if text.startswith("<") and text != markup]
    assert len(html) > 3
    assert not [text for text in html if "<img" in text]


def test_findings_beyond_the_first_are_counted_until_asked_for():
    many = [Finding("PL104", "warning", "k", f"C{i}", "message") for i in range(MOST_FINDINGS + 2)]
    asked = []
    cards = finding_cards(many, asked.append, lambda: asked.append("more"))
    assert len(cards) == MOST_FINDINGS + 1
    cards[-1].click()
    assert (cards[-1].description, asked) == ("Show 2 more findings", ["more"])
    assert len(finding_cards(many, asked.append, None)) == MOST_FINDINGS + 2


def test_what_goes_wrong_while_looking_is_shown_and_not_raised(form, monkeypatch):
    def broken(*_):
        raise RuntimeError("the catalog is gone")

    monkeypatch.setattr(sys.modules["patchlab.notebook.forms"], "answer", broken)
    form.key.value = "LlamaMLP"

    assert form.error == "RuntimeError: the catalog is gone"
    with pytest.raises(RuntimeError, match="the catalog is gone"):
        form.check()


def test_check_returns_the_same_as_is_shown(form):
    form.key.value, form.cls.value = "LlamaMLP", "MyMLP"
    told = form.check()
    assert (told.matches, told.class_note) == (form.answer.matches, form.answer.class_note)
    assert "config" in told.class_note


def test_saved_form_has_text_and_html_beside_the_widget(form):
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    bundle = form._repr_mimebundle_()

    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "LlamaMLP" in bundle["text/plain"]
    assert "LlamaMLP" in bundle["text/html"]
    assert "<script" not in bundle["text/html"]


def test_closed_form_no_longer_follows(form, namespace):
    other = PatchForm(namespace=namespace)
    other.close()
    form.key.value, form.cls.value = "LlamaMLP", "MyMLP"
    form.register()
    assert other.comm is None


def test_form_whose_output_is_gone_waits_until_it_is_shown_again(form):
    for kind in ("shown", "shown", "hidden", "hidden"):
        form.copy._receive(form.copy, {"type": kind}, [])
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    form.refresh()
    assert "LlamaMLP" not in " ".join(texts(form))
    form.copy._receive(form.copy, {"type": "shown"}, [])
    assert "LlamaMLP → SubMLP" in " ".join(texts(form))


# In a notebook


def run(shell, source):
    shell.run_cell(source).raise_error()
    return shell.user_ns


def test_classes_of_the_notebook_are_offered_as_they_are_defined(shell):
    form = run(shell, "import patchlab\nform = patchlab.patch_form()")["form"]
    assert "MyAttention · __main__" in form.cls.options
    assert not any(name.startswith("Fresh") for name in form.cls.options)
    run(shell, "class Fresh(nn.Module): pass")
    assert "Fresh · __main__" in form.cls.options
    assert form.cls.options.index("Fresh · __main__") < form.cls.options.index(
        f"BertModel · {shell.user_ns['BertModel'].__module__}"
    )
    form.close()


def test_what_a_cell_registers_is_shown_and_a_class_defined_again_is_told(shell):
    form = run(shell, "import patchlab\nform = patchlab.patch_form()")["form"]
    run(shell, "patchlab.register_patch_mapping({'BertSelfAttention': MyAttention})")
    assert "BertSelfAttention → MyAttention" in " ".join(texts(form))
    assert "defined again" not in " ".join(texts(form))
    run(shell, "class MyAttention(BertSelfAttention):\n    pass")
    assert "MyAttention has been defined again since" in " ".join(texts(form))
    form.key.value, form.cls.value = "BertSelfAttention", "MyAttention · __main__"
    form.register()
    assert "defined again" not in " ".join(texts(form))
    assert patchlab.get_patch_mapping()["BertSelfAttention"] is shell.user_ns["MyAttention"]
    form.close()
    patchlab.clear_patch_mapping()


def test_closed_form_leaves_the_shell(shell):
    before = list(shell.events.callbacks["post_run_cell"])
    form = run(shell, "import patchlab\nform = patchlab.patch_form()")["form"]
    assert len(shell.events.callbacks["post_run_cell"]) == len(before) + 1
    form.close()
    assert shell.events.callbacks["post_run_cell"] == before


def test_code_of_a_finding_opens_what_it_means():
    finding = Finding("PL101", "error", "<key>", "", "holds <others>")

    html = finding_html(finding)

    assert html.startswith("<details><summary>")
    assert "PL101 container" in html
    assert patchlab.explain(finding).what in html
    assert "holds &lt;others&gt;" in html
