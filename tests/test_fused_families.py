"""Round trips over families: fuse q, k and v, load, generate, save, compare bytes; and swap."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file

import patchlab
from patchlab.errors import PatchlabWarning
from tests.fused_families import attentions, build, conversions, fused, model_types

# On transformers 5.24.0 there are 93; fewer than this, and the list has lost its point.
FLOOR = 60


def prepared(model_type):
    model = build(model_type)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            # Biases begin as zeros, and zeros in a wrong place would not be seen.
            parameter.add_(torch.randn_like(parameter) * 0.02)
    found = attentions(model)
    (sizes,) = {sizes for _, sizes in found.values()}
    mapping = {name: fused(cls) for name, (cls, _) in found.items()}
    return model, mapping, conversions(model, sizes)


def logits(model):
    ids = torch.arange(6, 16).view(2, 5)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(input_ids=ids).logits


def generated(model):
    ids = torch.arange(6, 16).view(2, 5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def read(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_there_are_many_families(capsys):
    with capsys.disabled():
        print(f"\n{len(model_types())} families with q, k and v projections")
    assert len(model_types()) >= FLOOR


@pytest.mark.parametrize("model_type", model_types())
def test_fused_attention_loads_generates_saves_and_swaps(model_type, tmp_path):
    with warnings.catch_warnings():
        # What families have to say of their configs is no concern here; ours would be an error.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", PatchlabWarning)
        model, mapping, converters = prepared(model_type)
        model.save_pretrained(tmp_path / "before")
        plain = type(model).from_pretrained(tmp_path / "before").eval()
        expected, tokens = logits(plain), generated(plain)

        report = patchlab.check_checkpoint(
            model, tmp_path / "before", mapping, conversions=converters
        )
        with patchlab.patched(mapping, conversions=converters):
            patched = type(model).from_pretrained(tmp_path / "before").eval()
        patched.save_pretrained(tmp_path / "after")

        assert report.ok, report.to_text()
        assert torch.allclose(logits(patched), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(generated(patched), tokens)
        before, after = read(tmp_path / "before"), read(tmp_path / "after")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

        with patchlab.swap(plain, mapping, conversions=converters) as swapped:
            assert swapped.ok, swapped.report.to_text()
            assert not swapped.report.constructed
            assert torch.allclose(logits(plain), expected, rtol=1e-4, atol=1e-5)
            plain.save_pretrained(tmp_path / "swapped")
        swapped_bytes = read(tmp_path / "swapped")
        assert before.keys() == swapped_bytes.keys()
        assert all(torch.equal(before[name], swapped_bytes[name]) for name in before)
        assert torch.equal(logits(plain), expected)
