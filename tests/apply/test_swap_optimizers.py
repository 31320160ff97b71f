"""Optimizers around a swap: which hold what is out of use, and which miss what is new."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab.errors import FindingWarning
from tests.toys import SubMLP, llama_config, tokens


class Gained(SubMLP):
    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, inputs):
        return self.gain * super().forward(inputs)


class Still(SubMLP):
    """What is new is not to be trained."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)


def of_optimizers(findings):
    return [f.message for f in findings if f.code == "PL306"]


def told_by(call):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [one for one in told if "PL306" in str(one.message)]


def fused(model, **options):
    mapping = {"LlamaAttention": FusedLlamaAttention}
    return patchlab.swap(model, mapping, conversions=llama_conversions(), **options)


def test_optimizer_that_misses_a_new_parameter_is_told_of(llama):
    optimizer = torch.optim.Adam(llama.parameters(), lr=0.1)
    told = told_by(lambda: patchlab.swap(llama, {"LlamaMLP": Gained}))
    assert ["a Adam trains this model, and no" in str(one.message) for one in told] == [True]
    assert "model.layers.1.mlp.gain" in str(told[0].message)

    llama(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    assert torch.equal(llama.model.layers[0].mlp.gain, torch.ones(32))  # What was said is so.


def test_ways_out_that_are_named_train_the_new_parameter(llama):
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    swapped = patchlab.swap(llama, {"LlamaMLP": Gained}, on_finding="ignore")
    assert len(of_optimizers(swapped.findings)) == 1
    gains = [layer.mlp.gain for layer in llama.model.layers]
    optimizer.add_param_group({"params": gains[:1]})
    after = torch.optim.SGD(gains[1:], lr=0.1)

    llama(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    after.step()

    assert not any(torch.equal(gain, torch.ones(32)) for gain in gains)


@pytest.mark.parametrize("replacement", [SubMLP, Still])
def test_swap_without_a_new_parameter_to_train_says_nothing_of_optimizers(llama, replacement):
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    swapped = patchlab.swap(llama, {"LlamaMLP": replacement}, on_finding="ignore")
    assert not of_optimizers(swapped.findings)
    assert optimizer.param_groups


def test_optimizer_of_another_model_is_no_business_of_a_swap(llama):
    other = torch.optim.SGD(type(llama)(llama_config()).parameters(), lr=0.1)
    swapped = patchlab.swap(llama, {"LlamaMLP": Gained}, on_finding="ignore")
    assert not of_optimizers(swapped.findings)
    assert other.param_groups


def test_optimizer_that_is_stale_is_told_of_once(llama):
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    swapped = fused(llama, on_finding="ignore")
    (message,) = of_optimizers(swapped.findings)
    assert "holds model.layers.0.self_attn.q_proj.weight" in message
    assert optimizer.param_groups


def test_undo_tells_of_an_optimizer_that_was_made_during_a_converting_swap(llama):
    old = llama.model.layers[0].self_attn
    swapped = fused(llama)
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)

    (told,) = told_by(swapped.undo)

    assert told.category is FindingWarning
    assert told.filename == told_by.__code__.co_filename
    assert "a SGD holds model.layers.0.self_attn.qkv_proj.weight" in str(told.message)
    assert llama.model.layers[0].self_attn is old
    assert not told_by(swapped.undo)
    assert optimizer.param_groups


def test_end_of_the_block_tells_of_it_and_an_error_that_is_under_way_is_let_alone(llama):
    kept = []

    def block(fails):
        with fused(llama):
            kept.append(torch.optim.SGD(llama.parameters(), lr=0.1))
            if fails:
                raise KeyError("the user's own")

    assert len(told_by(lambda: block(False))) == 1
    kept.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyError):
            block(True)
    assert not told
    assert kept


def test_warning_of_undo_that_is_an_error_comes_when_all_is_undone(llama):
    before = dict(llama.named_modules())
    swapped = fused(llama)
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    with pytest.raises(FindingWarning, match="since the swap was undone"):
        swapped.undo()
    assert swapped.undone
    assert dict(llama.named_modules()) == before
    assert optimizer.param_groups


@pytest.mark.parametrize("when", ["before", "after", "ignored", "only more"])
def test_undo_says_nothing_of_optimizers_that_train_what_the_model_has(llama, when):
    """Warnings are errors here."""
    if when == "only more":
        swapped = patchlab.swap(llama, {"LlamaMLP": Gained}, on_finding="ignore")
    elif when == "before":
        optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
        swapped = fused(llama, on_finding="ignore")
    else:
        swapped = fused(llama, on_finding="ignore" if when == "ignored" else "warn")
    if when in ("ignored", "only more"):
        optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    swapped.undo()
    if when == "after":
        optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    assert optimizer.param_groups
