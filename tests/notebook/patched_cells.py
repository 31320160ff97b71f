"""What tests of `%%patched` run, and what they look for afterwards."""

from __future__ import annotations

from transformers.models.bert.modeling_bert import BertSelfAttention

PATCHED = "%%patched ^BertSelfAttention$=MyAttention\n"
BUILD = "model = BertModel(config)\n"
SAID = "2 × BertSelfAttention → MyAttention · restored"


def replaced(shell, name="model"):
    """Count the modules of a model in the notebook that are instances of MyAttention."""
    return sum(type(m).__name__ == "MyAttention" for m in shell.user_ns[name].modules())


def assert_nothing_left(shell):
    """What is built after a cell is not patched, and no scope is open."""
    assert len(shell.magics_manager.registry["PatchMagics"].scopes) == 0
    assert "__init__" not in vars(BertSelfAttention) or (
        vars(BertSelfAttention)["__init__"].__qualname__ == "BertSelfAttention.__init__"
    )
    shell.run_cell("after = BertModel(config)").raise_error()
    assert replaced(shell, "after") == 0
