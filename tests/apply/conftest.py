"""The model that swaps are tried on."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.toys import llama_config


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config()).eval()
