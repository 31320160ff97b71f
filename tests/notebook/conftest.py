"""A fresh IPython shell in this process, as it would be in a terminal or an embedded kernel."""

from __future__ import annotations

import builtins
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@pytest.fixture
def bare_shell():
    """A shell without patchlab's extension; the process is as it was when the test ends."""
    kept = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    known = set(vars(builtins))
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.xmode = "Context"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    yield shell
    if "patchlab" in shell.extension_manager.loaded:
        shell.extension_manager.unload_extension("patchlab")
    InteractiveShell.clear_instance()
    sys.displayhook, sys.excepthook, sys.modules["__main__"] = kept
    for name in set(vars(builtins)) - known:
        delattr(builtins, name)


@pytest.fixture
def shell(bare_shell):
    """A shell with the extension, a tiny BERT's config and a replacement class."""
    ran = bare_shell.run_cell(SETUP)
    ran.raise_error()
    return bare_shell


SETUP = """
%load_ext patchlab
import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention
config = BertConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20
)
class MyAttention(BertSelfAttention):
    pass
class MyLayerNorm(nn.LayerNorm):
    pass
"""
