"""A fresh IPython shell in this process, as it would be in a terminal or an embedded kernel."""

from __future__ import annotations

import pytest

from tests.shells import fresh_shell


@pytest.fixture
def bare_shell():
    """A shell without patchlab's extension; the process is as it was when the test ends."""
    with fresh_shell() as shell:
        yield shell


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
