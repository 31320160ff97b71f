"""What a swap does about what is odd: warn, refuse with nothing changed, or only report it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

import patchlab
from patchlab.errors import FindingsError, FindingWarning, MappingError, NothingReplacedWarning
from tests.faults import Injected, interrupt_at
from tests.fused_families import attentions, conversions, fused
from tests.toys import SubMLP, tokens

FUSED = fused(LlamaAttention)
MAPPING = {"LlamaAttention": FUSED}


class Renamed(nn.Module):
    """Has the weight under another name, so that it holds what its constructor gives."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, x):
        return x @ self.kernel.T


class Taking(nn.Module):
    """Its factory takes the parts out of the original, whatever comes after."""

    @classmethod
    def from_original(cls, original):
        new = cls()
        new.parts = original._modules.pop("gate_proj")
        return new

    def forward(self, x):
        return x


def state(model):
    return [
        (name, module, type(module), dict(vars(module)), dict(module._modules))
        for name, module in model.named_modules()
    ]


def same(before, after):
    return len(before) == len(after) and all(
        a[:3] == b[:3] and a[3].keys() == b[3].keys() and a[4] == b[4]
        for a, b in zip(before, after, strict=True)
    )


def test_missing_conversion_is_warned_of_and_swapped(llama):
    with pytest.warns(FindingWarning, match="PL301"):
        swapped = patchlab.swap(llama, MAPPING)
    assert not swapped.ok
    swapped.undo()


def test_missing_conversion_is_refused_and_nothing_changed(llama):
    before = state(llama)

    with pytest.raises(FindingsError, match=r"(?s)nothing was swapped:.*PL301"):
        patchlab.swap(llama, MAPPING, on_finding="error")

    assert same(before, state(llama))


def test_missing_conversion_is_only_reported_if_findings_are_ignored(llama):
    """Warnings are errors here."""
    swapped = patchlab.swap(llama, MAPPING, on_finding="ignore")
    assert [finding.code for finding in swapped.findings if finding.severity == "error"]


def test_swap_with_its_conversions_is_done_however_strict(llama):
    """Guards the refusal, which could refuse everything."""
    sizes = attentions(llama)["LlamaAttention"][1]
    swapped = patchlab.swap(
        llama, MAPPING, conversions=conversions(llama, sizes), on_finding="error"
    )
    assert swapped.ok
    assert sum(swapped.counts.values())


def test_finding_that_is_no_error_is_a_warning_however_strict(llama):
    with pytest.warns(NothingReplacedWarning):
        swapped = patchlab.swap(
            llama, {"LlamaMLP": SubMLP, "LlamaMLPP": SubMLP}, on_finding="error"
        )
    assert swapped.counts["LlamaMLP"] == 2


def test_factory_that_took_parts_out_is_put_back_by_the_refusal(llama):
    before, expected = state(llama), llama(tokens()).logits
    mapping = {"LlamaMLP": Taking, "Linear": Renamed}

    with pytest.raises(FindingsError):
        patchlab.swap(llama, mapping, on_finding="error")

    assert same(before, state(llama))
    assert torch.equal(llama(tokens()).logits, expected)


@pytest.mark.parametrize("value", ["strict", None, True, "Warn"])
def test_other_values_are_refused_as_patched_refuses_them(llama, value):
    before = state(llama)
    told = []
    for call in (
        lambda: patchlab.swap(llama, {"LlamaMLP": SubMLP}, on_finding=value),
        lambda: patchlab.patched({"LlamaMLP": SubMLP}, on_finding=value),
    ):
        with pytest.raises(MappingError, match="one of 'warn', 'error' and 'ignore'") as refused:
            call()
        told.append(str(refused.value))
    assert told[0] == told[1]
    assert same(before, state(llama))


@pytest.mark.parametrize("on_finding", ["warn", "error", "ignore"])
def test_warning_that_is_an_error_changes_nothing(llama, on_finding):
    before = state(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if on_finding == "ignore":
            patchlab.swap(llama, {"Renamed": SubMLP}, on_finding=on_finding).undo()
        else:
            with pytest.raises(NothingReplacedWarning):
                patchlab.swap(llama, {"Renamed": SubMLP}, on_finding=on_finding)
    assert same(before, state(llama))


def test_interrupt_at_the_refusal_changes_nothing(llama):
    before = state(llama)

    def refused():
        with pytest.raises(FindingsError):
            patchlab.swap(llama, MAPPING, on_finding="error")

    def within(file):
        return file.endswith("apply/swap.py")

    with interrupt_at(0, within) as lines:
        refused()
    assert lines[0] > 10
    for step in range(1, lines[0] + 1):
        with pytest.raises(Injected), interrupt_at(step, within):
            refused()
        assert same(before, state(llama)), step
