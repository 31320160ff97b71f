"""Swaps that convert: transposed weights, by the same conversions that a load takes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import WeightConverter
from transformers.core_model_loading import Transpose
from transformers.pytorch_utils import Conv1D

import patchlab
from patchlab.errors import FindingWarning, SwapError
from tests.toys import SubMLP, gpt2, tokens


class LinearConv1D(nn.Linear):
    """GPT-2's Conv1D as the Linear it is, so with a transposed weight."""

    def __init__(self, nf, nx):
        super().__init__(nx, nf)


def transposed():
    names = ("c_attn", "c_proj", "c_fc")
    return {
        "gpt2": [
            WeightConverter(
                source_patterns=[f"{name}.weight"],
                target_patterns=[f"{name}.weight"],
                operations=[Transpose(0, 1)],
            )
            for name in names
        ]
    }


def test_conversion_runs_also_where_shapes_agree(tmp_path):
    """A square weight needs its transposition as much; the saved checkpoint is the old one."""
    model = gpt2()
    expected, before = model(tokens()).logits, {k: v.clone() for k, v in model.state_dict().items()}

    with patchlab.swap(model, {"Conv1D": LinearConv1D}, conversions=transposed()) as swapped:
        assert torch.allclose(model(tokens()).logits, expected, rtol=0, atol=1e-6)
        assert (swapped.report.converted, swapped.report.shared) == (8, 8)
        model.save_pretrained(tmp_path)

    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert "_weight_conversions" not in vars(model)
    assert torch.equal(model(tokens()).logits, expected)


def test_missing_conversion_is_refused_and_nothing_is_changed():
    model = gpt2()
    modules = list(model.modules())

    with pytest.raises(SwapError, match=r"c_attn\.weight has shape \(32, 96\)"):
        patchlab.swap(model, {"Conv1D": LinearConv1D})

    assert list(map(id, model.modules())) == list(map(id, modules))


def test_conversion_in_a_plain_model_goes_by_the_class_of_the_root():
    class Turned(nn.Module):
        def __init__(self, in_features, out_features, bias):
            super().__init__()
            self.turned = nn.Parameter(torch.empty(in_features, out_features))

        def forward(self, inputs):
            return inputs @ self.turned

    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    inputs = torch.ones(1, 2)
    expected = model(inputs)
    turn = WeightConverter(
        source_patterns=["weight"], target_patterns=["turned"], operations=[Transpose(0, 1)]
    )

    swapped = patchlab.swap(model, {"Linear": Turned}, conversions={"Sequential": [turn]})

    assert torch.equal(model(inputs), expected)
    assert swapped.report.converted == 1


def test_tensors_converted_in_inference_mode_can_be_trained():
    model = gpt2()

    with torch.inference_mode():
        patchlab.swap(model, {"Conv1D": LinearConv1D}, conversions=transposed())

    model(tokens(), labels=tokens()).loss.backward()
    assert model.transformer.h[0].mlp.c_fc.weight.grad is not None


def test_conversion_that_raises_changes_nothing():
    class Raising(Transpose):
        def convert(self, *args, **kwargs):
            raise ZeroDivisionError("no")

    model, conversions = gpt2(), transposed()
    conversions["gpt2"][0].operations[:] = [Raising(0, 1)]
    modules = list(model.modules())

    with pytest.raises(SwapError, match=r"c_attn\.weight' raised ZeroDivisionError"):
        patchlab.swap(model, {"Conv1D": LinearConv1D}, conversions=conversions)

    assert list(map(id, model.modules())) == list(map(id, modules))
    assert "_weight_conversions" not in vars(model)


def test_conversion_that_gives_another_shape_is_told_with_both():
    conversions = transposed()
    for converter in conversions["gpt2"]:
        converter.operations[:] = [Transpose(0, 1), Transpose(0, 1)]

    told = r"c_attn\.weight, which gives the shape \(32, 96\), and LinearConv1D wants \(96, 32\)"
    with pytest.raises(SwapError, match=told):
        patchlab.swap(gpt2(), {"Conv1D": LinearConv1D}, conversions=conversions)


def test_conversion_that_does_not_reverse_is_told_when_its_result_is_replaced():
    class OneWay(Transpose):
        @property
        def reverse_op(self):
            raise NotImplementedError("one way")

    class Keeping(LinearConv1D):
        def __init__(self, nf, nx):
            super().__init__(nf, nx)
            self.nf, self.nx = nf, nx

    class Untransposed(Conv1D):
        def __init__(self, nf, nx):
            super().__init__(nf, nx)

    model, conversions = gpt2(), transposed()
    for converter in conversions["gpt2"]:
        converter.operations[:] = [OneWay(0, 1)]
    patchlab.swap(model, {"Conv1D": Keeping}, conversions=conversions)
    modules = list(map(id, model.modules()))

    told = "NotImplementedError: one way. The conversions that the model was loaded with do not"
    with pytest.raises(SwapError, match=told):
        patchlab.swap(model, {"Keeping": Untransposed}, conversions=transposed())
    assert list(map(id, model.modules())) == modules


def test_conversions_for_another_model_type_are_found(llama):
    with pytest.warns(FindingWarning, match=r"PL305 .*'gpt2'"):
        patchlab.swap(llama, {"LlamaMLP": SubMLP}, conversions=transposed())
