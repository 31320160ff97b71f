"""The checkpoint that checks are tried on."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.toys import llama_config


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(folder)
    return folder
