"""A person loads the extension, patches a model in a cell, and reads what happened under it."""

from __future__ import annotations

from playwright.sync_api import expect

DEFINE = """
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention

class MyAttention(BertSelfAttention):
    pass

config = BertConfig(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8, vocab_size=20
)
"""
BUILD = """# a comment above does no harm
%%patched ^BertSelfAttention$=MyAttention
model = BertModel(config)
41 + 1
"""
REPLACED = "sum(type(m).__name__ == 'MyAttention' for m in {}.modules())"


def test_patched_cell_replaces_for_itself_and_says_so(lab):
    lab.open(["%load_ext patchlab", DEFINE, BUILD, "other = BertModel(config)"]).run_all()

    expect(lab.output(2)).to_contain_text("model: 3 × BertSelfAttention → MyAttention · restored")
    expect(lab.output(2)).to_contain_text("42")
    assert lab.ask(REPLACED.format("model")) == "3"
    assert lab.ask(REPLACED.format("other")) == "0"
    assert lab.errors == []


def test_run_all_stops_at_a_patched_cell_that_fails(lab):
    cells = ["%load_ext patchlab", DEFINE, BUILD + "1/0", "reached = True"]
    lab.open(cells).run_all()

    expect(lab.output(2)).to_contain_text("ZeroDivisionError")
    assert lab.ask("'reached' in globals()") == "False"
    assert lab.ask("type(BertModel(config).encoder.layer[0].attention.self).__name__") == (
        "'BertSelfAttention'"
    )


def test_unknown_class_is_told_with_the_nearest_and_nothing_runs(lab):
    cells = ["%load_ext patchlab", DEFINE, "%%patched BertSelfAttention=MyAtention\nran = True"]
    lab.open(cells).run_all()

    expect(lab.output(2)).to_contain_text("Did you mean MyAttention?")
    assert lab.ask("'ran' in globals()") == "False"
