"""Swaps: tensors shared, converted or constructed; all or nothing; undone to the same objects."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchlab
from patchlab.errors import MappingError, SwapError
from tests.faults import Injected, interrupt_at
from tests.toys import (
    BuiltAttention,
    BuiltMLP,
    PlainMLP,
    RefusingMLP,
    SubAttention,
    SubMLP,
    count,
    llama_config,
    tokens,
)

CLONED = {"LlamaMLP": SubMLP, "LlamaAttention": SubAttention}
CONSTRUCTED = {"LlamaMLP": BuiltMLP, "LlamaAttention": BuiltAttention}
both_ways = pytest.mark.parametrize("mapping", [CLONED, CONSTRUCTED], ids=["cloned", "constructed"])


def storages(model):
    return {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}


# Sharing


@both_ways
def test_swapped_model_gives_the_same_logits_and_holds_the_same_parameters(llama, mapping):
    expected, parameters = llama(tokens()).logits, dict(llama.named_parameters())

    swapped = patchlab.swap(llama, mapping)

    assert torch.equal(llama(tokens()).logits, expected)
    after = dict(llama.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in parameters)
    assert swapped.report.copied_bytes == 0
    assert swapped.ok


def test_printed_swap_is_the_text_of_its_report_and_says_when_it_is_undone(llama):
    swapped = patchlab.swap(llama, CLONED)
    assert str(swapped) == swapped.report.to_text()
    assert "LlamaMLP" in str(swapped)

    swapped.undo()
    assert str(swapped).splitlines()[-1] == "undone"


@both_ways
def test_no_storage_is_added_where_layouts_agree(llama, mapping):
    before = storages(llama)

    with patchlab.swap(llama, mapping):
        assert storages(llama) == before


@both_ways
def test_undo_gives_back_the_very_same_modules_and_attributes(llama, mapping):
    modules = dict(llama.named_modules())
    variables = {name: dict(vars(module)) for name, module in modules.items()}

    with patchlab.swap(llama, mapping):
        assert dict(llama.named_modules()) != modules

    again = dict(llama.named_modules())
    assert again.keys() == modules.keys()
    assert all(again[name] is modules[name] for name in modules)
    assert {name: dict(vars(module)) for name, module in again.items()} == variables


@settings(max_examples=12)
@given(st.sets(st.sampled_from(["mlp", "attention", "norm", "linear"]), min_size=1))
def test_any_set_of_subclasses_gives_the_same_logits_and_is_undone(kinds):
    class Norm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
        pass

    class Lin(nn.Linear):
        def __init__(self, in_features, out_features, bias=True):
            super().__init__(in_features, out_features, bias)

    rules = {"mlp": ("LlamaMLP", BuiltMLP), "attention": ("LlamaAttention", SubAttention)}
    rules |= {"norm": ("LlamaRMSNorm", Norm), "linear": ("lm_head|^Linear$", Lin)}
    model = transformers.LlamaForCausalLM(llama_config()).eval()
    expected, modules = model(tokens()).logits, list(model.modules())

    with patchlab.swap(model, dict(rules[kind] for kind in kinds)) as swapped:
        assert torch.equal(model(tokens()).logits, expected)
        assert all(swapped.counts.values())

    assert list(map(id, model.modules())) == list(map(id, modules))


# All or nothing


def test_swap_shows_itself_in_every_form_that_its_report_has(llama):
    swapped = patchlab.swap(llama, {"LlamaMLP": SubMLP})
    report = swapped.report

    assert swapped.to_text() == report.to_text()
    assert swapped.to_html(max_rows=1) == report.to_html(max_rows=1)
    assert swapped.to_dot() == report.to_dot()
    assert swapped.to_frame().equals(report.to_frame())
    swapped.undo()
    assert swapped.to_text().splitlines()[0] == f"{report.verdict} · undone"
    assert report.to_text().splitlines()[0] == report.verdict


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ({"LlamaMLP": RefusingMLP}, SwapError),
        ({"LlamaAttention": SubAttention, "LlamaMLP": RefusingMLP}, SwapError),
        ({"*MLP": SubMLP}, MappingError),
    ],
)
def test_failure_leaves_the_model_as_it_was(llama, mapping, error):
    modules = dict(llama.named_modules())
    variables = {name: dict(vars(module)) for name, module in modules.items()}

    with pytest.raises(error):
        patchlab.swap(llama, mapping)

    assert dict(llama.named_modules()) == modules
    assert {name: dict(vars(module)) for name, module in modules.items()} == variables


def test_interrupt_at_any_line_leaves_a_whole_model(llama):
    """Either all modules are the old ones, or all are replaced; never some of each."""
    within = lambda file: file.endswith("apply/swap.py")  # noqa: E731
    with interrupt_at(0, within) as seen:
        patchlab.swap(llama, {"LlamaMLP": SubMLP}).undo()
    total = seen[0]
    assert total > 50
    for step in range(1, total + 1, 3):
        modules = [llama.model.layers[0].mlp, llama.model.layers[1].mlp]
        try:
            with interrupt_at(step, within):
                patchlab.swap(llama, {"LlamaMLP": SubMLP})
        except Injected:
            assert [llama.model.layers[0].mlp, llama.model.layers[1].mlp] == modules
            assert count(llama, SubMLP) == 0
        else:
            break


def test_weights_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config())

    with pytest.raises(SwapError, match="on the meta device"):
        patchlab.swap(model, {"LlamaMLP": SubMLP})


def test_constructor_that_cannot_be_replayed_asks_for_a_factory():
    class Secret(nn.Module):
        def __init__(self, size, secret):
            super().__init__()
            self.linear = nn.Linear(size, size)

    class Other(Secret):
        def __init__(self, size, secret):
            super().__init__(size, secret)

    with pytest.raises(SwapError, match=r"takes 'size'.*from_original\(cls, original\)"):
        patchlab.swap(nn.Sequential(Secret(2, 3)), {"Secret": Other})


class Sized(nn.Module):
    def __init__(self, size):
        super().__init__()
        if size > 8:
            raise ValueError("too large")
        self.size, self.linear = size, nn.Linear(size, size)


class OtherSized(Sized):
    def __init__(self, size):
        super().__init__(size)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (9, "its constructor raised ValueError: too large, with what could be read"),
        (3, "a second one, built with what could be read off it, differs"),
    ],
)
def test_module_that_was_changed_since_it_was_built_asks_for_a_factory(size, told):
    model = nn.Sequential(Sized(2))
    model[0].size = size

    with pytest.raises(SwapError, match=rf"{told}.*from_original\(cls, original\)"):
        patchlab.swap(model, {"Sized": OtherSized})


def test_parameter_of_the_same_name_and_another_shape_is_refused(llama):
    with pytest.raises(SwapError, match=r"has shape \(64, 32\) .* Give a weight conversion"):
        patchlab.swap(llama, {"LlamaMLP": PlainMLP})


def test_error_in_the_block_undoes_the_swap(llama):
    mlp = llama.model.layers[0].mlp

    with pytest.raises(KeyError), patchlab.swap(llama, {"LlamaMLP": SubMLP}):
        raise KeyError

    assert llama.model.layers[0].mlp is mlp


def test_registered_mapping_is_used_when_none_is_given(llama):
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})
    try:
        with patchlab.swap(llama) as swapped:
            assert swapped.counts == {"LlamaMLP": 2}
    finally:
        patchlab.clear_patch_mapping()
