"""Replacements made by their own `from_original`, which has the live module in its hands."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from patchlab.errors import SwapError
from tests.toys import tokens


class Wrap(nn.Module):
    """Holds the module whose place it takes."""

    @classmethod
    def from_original(cls, original):
        wrapped = cls()
        wrapped.inner = original
        return wrapped

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Taking(nn.Module):
    """Takes the parts out of the original, and leaves a mark on it."""

    fails_after = None
    made = 0

    @classmethod
    def from_original(cls, original):
        taken = cls()
        taken.gate, taken.up, taken.down = original.gate_proj, original.up_proj, original.down_proj
        del original.gate_proj, original.up_proj
        original.down_proj = nn.Identity()
        original.act_fn.register_forward_hook(lambda *args: None)
        original.mark = "taken"
        cls.made += 1
        if cls.made == cls.fails_after:
            raise RuntimeError("half-way")
        return taken

    def forward(self, inputs):
        return self.down(nn.functional.silu(self.gate(inputs)) * self.up(inputs))


def state_of(model):
    return {
        fqn: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        for fqn, module in model.named_modules()
    }


def test_hook_of_a_module_that_is_wrapped_runs_once():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda *args: seen.append(1))

    patchlab.swap(model, {"Linear": Wrap})
    model(torch.ones(1, 4))

    assert seen == [1]


def test_flags_of_a_module_that_is_wrapped_stay_as_they_are(llama):
    layer = llama.model.layers[0].train()
    layer.mlp.eval()

    with patchlab.swap(llama, {"LlamaDecoderLayer": Wrap}):
        assert layer.training
        assert not layer.mlp.training

    assert layer.training
    assert not layer.mlp.training


def test_tensors_that_a_factory_takes_over_are_counted(llama):
    swapped = patchlab.swap(llama, {"LlamaMLP": Wrap})

    assert (swapped.report.shared, swapped.report.copied_bytes) == (6, 0)


@pytest.mark.filterwarnings("ignore::patchlab.errors.FindingWarning")  # its own hook stays behind
def test_original_that_a_factory_has_taken_apart_is_whole_after_the_undo(llama):
    before, expected = state_of(llama), llama(tokens()).logits

    with patchlab.swap(llama, {"LlamaMLP": Taking}):
        assert torch.allclose(llama(tokens()).logits, expected, rtol=0, atol=1e-6)

    assert state_of(llama) == before
    assert torch.equal(llama(tokens()).logits, expected)


@pytest.mark.parametrize("number", [1, 2])
def test_original_that_a_factory_has_taken_apart_is_whole_after_its_failure(
    llama, monkeypatch, number
):
    monkeypatch.setattr(Taking, "made", 0)
    monkeypatch.setattr(Taking, "fails_after", number)
    before = state_of(llama)

    with pytest.raises(SwapError, match=r"Taking\.from_original raised RuntimeError.*half-way"):
        patchlab.swap(llama, {"LlamaMLP": Taking})

    assert state_of(llama) == before


def test_original_is_whole_after_a_later_failure(llama):
    class Refusing(LlamaMLP):
        def __init__(self, config):
            raise ValueError("refused")

    class Other(transformers.models.llama.modeling_llama.LlamaRMSNorm):
        @classmethod
        def from_original(cls, original):
            del original.weight
            return original

    before = state_of(llama)

    with pytest.raises(SwapError, match="refused"):
        patchlab.swap(llama, {"LlamaRMSNorm": Other, "LlamaMLP": Refusing})

    assert state_of(llama) == before


@pytest.mark.parametrize("returned", [None, 3, nn.Linear])
def test_factory_that_returns_no_module_is_refused(llama, returned):
    class Wrong(nn.Module):
        @classmethod
        def from_original(cls, original):
            return returned

    with pytest.raises(SwapError, match="it must return a module"):
        patchlab.swap(llama, {"LlamaMLP": Wrong})


def test_factory_that_leaves_a_tensor_on_the_meta_device_is_refused(llama):
    class Empty(nn.Module):
        @classmethod
        def from_original(cls, original):
            made = cls()
            made.gain = nn.Parameter(torch.empty(3, device="meta"))
            return made

    with pytest.raises(SwapError, match=r"left gain on the meta device"):
        patchlab.swap(llama, {"LlamaMLP": Empty})
