"""The laboratory without a front end: what is shown is what the preview and the swap say."""

from __future__ import annotations

import asyncio

import pytest
import torch
import transformers
from torch import nn

import patchlab
from patchlab.errors import MappingError, SwapError, TargetError
from patchlab.notebook.lab import Lab
from tests.toys import CountingAttention, RefusingMLP, bert_config, classes_in, tokens

NARROW = "^Bert(?:Cross|Self)Attention$"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return transformers.BertModel(bert_config()).eval()


@pytest.fixture
def namespace(model):
    return {"MyAttention": CountingAttention, "RefusingMLP": RefusingMLP, "net": model}


@pytest.fixture
def panel(model, namespace):
    made = Lab(model, namespace=namespace)
    yield made
    made.close()
    patchlab.clear_patch_mapping()


def marked(panel):
    """Return the states that the tree shows, from what is sent to the browser."""
    states = dict(panel.tree._marks)
    return {state: sorted(f for f in states if states[f] == state) for state in states.values()}


def test_matches_are_marked_as_soon_as_a_key_is_there(panel, model):
    panel.form.key.value = ".*Attention"

    found = marked(panel)
    assert found["container"] == [f"encoder.layer.{i}.attention" for i in range(2)]
    assert "encoder.layer.0.attention.self" in found["swallowed"]
    assert "4 modules matched in BertModel" in panel.verdict
    assert panel.preview is None
    assert "4 modules here" in panel.form.answer.matches


def test_shown_preview_is_the_preview(panel, model):
    panel.form.key.value, panel.form.cls.value = ".*Attention", "MyAttention"
    expected = patchlab.preview(model, {".*Attention": CountingAttention})

    assert panel.preview.counts == expected.counts
    assert panel.findings == expected.findings
    assert panel.verdict == (
        "4 modules replaced by 1 rule in BertModel · 48 modules · 21.3 k parameters"
    )


def test_rule_is_told_of_what_it_puts_in_and_not_of_what_goes_with_a_container(panel):
    panel.form.key.value, panel.form.cls.value = ".*Attention", "MyAttention"

    panel.tree.selected = "encoder.layer.0.attention"
    assert panel.tree.details["rule"] == "'.*Attention' (pattern) puts CountingAttention here."
    panel.tree.selected = "encoder.layer.0.attention.self"
    assert panel.tree.details["rule"] == ""


@pytest.mark.parametrize("name", ["MyAttention", "A" * 40])
def test_class_that_its_field_cuts_is_told_with_its_python_module(panel, namespace, name):
    namespace[name] = CountingAttention
    panel.form.key.value, panel.form.cls.value = NARROW, f"{name} · tests.toys"

    told = panel.form.answer.class_note
    assert "built with (config" in told
    assert told.startswith("tests.toys · ") == (len(name) > 30)


def test_suggestion_of_the_tree_and_of_the_form_reach_the_key(panel):
    panel.form.key.value, panel.form.cls.value = ".*Attention", "MyAttention"
    assert not panel.preview.ok
    panel.tree.suggest(NARROW)

    assert panel.form.key.value == NARROW
    assert panel.preview.ok
    assert panel.preview.counts == {NARROW: 2}
    assert marked(panel) == {"pattern": [f"encoder.layer.{i}.attention.self" for i in range(2)]}


def test_looking_changes_neither_the_model_nor_the_registry(panel, model):
    before = list(model.named_modules())
    panel.form.key.value, panel.form.cls.value = NARROW, "MyAttention"
    assert panel.preview.counts == {NARROW: 2}

    assert list(model.named_modules()) == before
    assert patchlab.get_patch_mapping() == {}


def test_applied_rule_is_in_the_model_until_it_is_undone(panel, model):
    inputs = {"input_ids": tokens()}
    expected, before = model(**inputs).last_hidden_state, list(model.modules())
    assert panel.apply_button.disabled
    assert panel.undo_button.disabled
    panel.form.key.value, panel.form.cls.value = NARROW, "MyAttention"
    CountingAttention.calls = 0
    panel.apply_button.click()

    assert classes_in(model).count(CountingAttention) == 2
    assert panel.verdict == "2 modules replaced in BertModel, until Undo"
    assert torch.equal(model(**inputs).last_hidden_state, expected)
    assert CountingAttention.calls == 2
    panel.undo_button.click()
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    assert panel.undo_button.disabled
    with pytest.raises(SwapError, match="nothing to undo"):
        panel.undo()


def test_another_key_is_looked_at_while_one_is_applied(panel, model):
    panel.form.key.value, panel.form.cls.value = NARROW, "MyAttention"
    panel.apply()
    panel.form.key.value = "BertSelfOutput"
    assert "replaced by 1 rule" in panel.verdict
    assert not panel.undo_button.disabled
    panel.form.key.value = NARROW
    assert panel.verdict.endswith("until Undo")
    panel.undo()
    assert classes_in(model).count(CountingAttention) == 0


def test_tree_is_not_sent_again_while_a_key_is_typed(panel):
    sent = []
    panel.tree.observe(sent.append, "payload")
    panel.form.key.value = "BertSelf"
    panel.form.key.value = "BertSelfAttention"
    assert sent == []
    assert marked(panel)["exact"]
    panel.form.cls.value = "MyAttention"
    assert len(sent) == 1


def test_refused_swap_changes_nothing_and_is_shown_in_the_form(panel, model):
    before = list(model.modules())
    panel.form.key.value, panel.form.cls.value = "BertIntermediate", "RefusingMLP"
    with pytest.raises(SwapError):
        panel.apply()
    panel.apply_button.click()

    assert "RefusingMLP" in panel.form.error
    assert list(model.modules()) == before
    assert panel.undo_button.disabled


def test_what_is_registered_is_part_of_what_is_shown(panel):
    patchlab.register_patch_mapping({"BertSelfAttention": CountingAttention})
    panel.form.refresh()
    assert panel.preview.counts == {"BertSelfAttention": 2}
    panel.form.key.value = ".*SelfAttention"
    assert marked(panel) == {"shadowed": [f"encoder.layer.{i}.attention.self" for i in range(2)]}
    panel.form.unregister("BertSelfAttention")
    assert marked(panel) == {"pattern": [f"encoder.layer.{i}.attention.self" for i in range(2)]}


def test_of_registered_keys_only_errors_are_told_while_another_is_typed(panel):
    patchlab.register_patch_mapping({"LlamaMLP": CountingAttention})
    panel.form.refresh()
    assert {finding.key for finding in panel.findings} == {"LlamaMLP"}
    panel.form.key.value, panel.form.cls.value = NARROW, "MyAttention"
    assert panel.preview.counts == {"LlamaMLP": 0, NARROW: 2}
    assert {finding.key for finding in panel.findings} <= {NARROW}
    patchlab.register_patch_mapping({".*Attention": CountingAttention})
    panel.form.key.value, panel.form.cls.value = "BertPooler", "RefusingMLP"
    panel.form.refresh()
    assert {finding.key for finding in panel.findings} == {".*Attention", "BertPooler"}


@pytest.mark.parametrize("registered", [False, True])
def test_code_shows_the_same_preview(panel, namespace, registered):
    if registered:
        patchlab.register_patch_mapping({"BertLayer": CountingAttention})
        panel.form.refresh()
    panel.form.key.value, panel.form.cls.value = NARROW, "MyAttention"
    code = panel.to_code()
    assert code.startswith("patchlab.preview(net, ")
    shown = eval(code, {"patchlab": patchlab, **namespace})

    assert shown.counts == panel.preview.counts
    assert panel.copy.code == code
    assert panel.apply_button.tooltip == code.replace("preview", "swap")


def test_incomplete_panel_says_why_it_has_no_code(panel):
    panel.form.key.value = NARROW
    with pytest.raises(MappingError, match="no replacement class is chosen"):
        panel.to_code()
    panel.copy.click()
    assert "no replacement class is chosen" in panel.form.error


def test_config_is_shown_and_cannot_be_swapped(namespace):
    panel = Lab(bert_config(), namespace=namespace)
    panel.form.key.value, panel.form.cls.value = NARROW, "MyAttention"

    assert panel.preview.counts == {NARROW: 2}
    assert panel.apply_button.disabled
    with pytest.raises(TargetError, match="only a model can be swapped"):
        panel.apply()
    panel.close()


def test_model_without_a_config_is_shown_and_swapped(namespace):
    namespace["Doubled"] = type("Doubled", (nn.Linear,), {})
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    panel = Lab(model, namespace=namespace)
    panel.form.key.value, panel.form.cls.value = "Linear", "Doubled"
    panel.apply()
    assert type(model[0]).__name__ == "Doubled"
    panel.undo()
    assert type(model[0]) is nn.Linear
    panel.close()


def test_without_a_target_there_is_the_form_alone(namespace):
    panel = Lab(namespace=namespace)
    panel.form.key.value, panel.form.cls.value = "BertSelfAttention", "MyAttention"
    panel.form.register()

    assert panel.tree is None
    assert patchlab.get_patch_mapping() == {"BertSelfAttention": CountingAttention}
    assert panel.to_code() == panel.form.to_code()
    assert "BertSelfAttention" in panel.to_html()
    panel.close()
    patchlab.clear_patch_mapping()


@pytest.mark.parametrize("target", [3, "/no/such/folder", nn.Linear])
def test_what_is_no_target_is_refused(target):
    with pytest.raises(TargetError):
        Lab(target, namespace={})


def test_saved_panel_has_text_and_html_beside_the_widget(panel):
    panel.form.key.value, panel.form.cls.value = ".*Attention", "MyAttention"
    bundle = panel._repr_mimebundle_()

    assert "application/vnd.jupyter.widget-view+json" in bundle
    for kind in ("text/plain", "text/html"):
        assert "BertSelfAttention" in bundle[kind]
        assert "PL101" in bundle[kind]
        assert "4 modules replaced by 1 rule" in bundle[kind]
    assert "<script" not in bundle["text/html"]


def test_while_typing_only_the_last_key_is_answered_beside_the_loop(panel):
    async def main():
        answers = []
        panel.form.on_answer(answers.append)
        for length in range(1, len("BertSelfAttention") + 1):
            panel.form.key.value = "BertSelfAttention"[:length]
        panel.form.cls.value = "MyAttention"
        assert answers == []
        for _ in range(2000):
            await asyncio.sleep(0.01)
            if not panel.form.busy:
                break
        return answers

    answers = asyncio.run(main())
    assert {told.question.key for told in answers} == {"BertSelfAttention"}
    assert [told.whole for told in answers] == [False, True]
    assert panel.preview.counts == {"BertSelfAttention": 2}
