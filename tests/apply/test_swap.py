"""Swaps: tensors shared, converted or constructed; all or nothing; undone to the same objects."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import WeightConverter
from transformers.core_model_loading import Transpose
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

import patchlab
from patchlab.errors import FindingWarning, MappingError, SwapError
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


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config()).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


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


# Constants and new parameters


class WithConstants(LlamaMLP):
    """Has one of each kind of tensor that a checkpoint does not hold."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)
        self.register_buffer("shift", torch.full((2,), 4.0))
        self.offset = torch.full((2,), 5.0)
        self.several = [torch.full((2,), 6.0)]


class WithParameter(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.bias2 = nn.Parameter(torch.full((4,), 7.0))


def test_constants_hold_what_the_constructor_gives(llama):
    with pytest.warns(FindingWarning, match=r"PL301 .*WithConstants has shift"):
        patchlab.swap(llama, {"LlamaMLP": WithConstants})

    mlp = llama.model.layers[1].mlp
    assert mlp.scale.tolist() == [3, 3]
    assert mlp.shift.tolist() == [4, 4]
    assert mlp.offset.tolist() == [5, 5]
    assert mlp.several[0].tolist() == [6, 6]


def test_new_parameter_holds_what_the_constructor_gives_and_is_found(llama):
    with pytest.warns(FindingWarning, match=r"WithParameter has bias2"):
        swapped = patchlab.swap(llama, {"LlamaMLP": WithParameter})

    assert llama.model.layers[0].mlp.bias2.tolist() == [7, 7, 7, 7]
    assert swapped.report.constructed == ("model.layers.0.mlp.bias2", "model.layers.1.mlp.bias2")
    assert swapped.ok


def test_buffer_that_is_drawn_at_random_is_drawn(llama):
    class Projecting(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("projection", torch.empty(64, 4).normal_(), persistent=False)
            self.register_buffer("range", torch.empty(9).uniform_(2, 3), persistent=False)

    patchlab.swap(llama, {"LlamaMLP": Projecting})

    mlp = llama.model.layers[0].mlp
    assert 0.5 < mlp.projection.std() < 1.5
    assert mlp.range.ge(2).all()
    assert mlp.range.le(3).all()


def test_tensors_inside_of_attributes_are_constructed(llama):
    class Tables(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.tables = {"a": torch.ones(2), "b": [torch.zeros(1), (torch.ones(1), 3)]}

    patchlab.swap(llama, {"LlamaMLP": Tables})

    tables = llama.model.layers[0].mlp.tables
    assert tables["a"].tolist() == [1, 1]
    assert tables["b"][0].tolist() == [0]
    assert tables["b"][1] == (torch.ones(1), 3)


def test_parameter_under_two_names_stays_one(llama):
    class Twice(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.again = self.up_proj.weight
            self.gain = self.scale = nn.Parameter(torch.ones(3))

    with pytest.warns(FindingWarning, match="PL301"):
        swapped = patchlab.swap(llama, {"LlamaMLP": Twice})

    mlp = llama.model.layers[0].mlp
    assert mlp.again is mlp.up_proj.weight
    assert mlp.gain is mlp.scale
    assert not any("again" in name for name in swapped.report.constructed)


def test_parameter_that_becomes_a_buffer_shares_its_storage_and_back():
    class Frozen(nn.Module):
        def __init__(self, in_features, out_features, bias):
            super().__init__()
            self.in_features, self.out_features = in_features, out_features
            self.register_buffer("weight", torch.empty(out_features, in_features))
            self.bias = nn.Parameter(torch.empty(out_features))

        def forward(self, inputs):
            return nn.functional.linear(inputs, self.weight, self.bias)

    class Thawed(nn.Linear):
        def __init__(self, in_features, out_features, bias):
            super().__init__(in_features, out_features)

    model = nn.Sequential(nn.Linear(4, 4))
    expected, place = model(torch.ones(1, 4)), model[0].weight.data_ptr()

    first = patchlab.swap(model, {"Linear": Frozen})
    second = patchlab.swap(model, {"Frozen": Thawed})

    assert torch.equal(model(torch.ones(1, 4)), expected)
    assert model[0].weight.data_ptr() == place
    assert isinstance(model[0].weight, nn.Parameter)
    assert first.ok
    assert second.ok
    assert first.report.copied_bytes == second.report.copied_bytes == 0


def test_old_names_that_a_load_understands_are_left_alone(llama):
    """`gamma` and `beta` of a live module are no old names for `weight` and `bias`."""

    class Affine(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            self.gamma = nn.Parameter(torch.full((2,), 2.0))
            self.weight = nn.Parameter(torch.full((2,), 3.0))

    class Other(Affine):
        def __init__(self, config):
            super().__init__(config)
            self.up_proj.register_buffer("one", torch.ones(1))

    for layer in llama.model.layers:
        layer.mlp = Affine(llama.config)
    gammas = [layer.mlp.gamma for layer in llama.model.layers]

    with pytest.warns(FindingWarning, match="one"):
        patchlab.swap(llama, {"Affine": Other})

    for layer, gamma in zip(llama.model.layers, gammas, strict=True):
        assert layer.mlp.gamma is gamma
        assert layer.mlp.weight.tolist() == [3, 3]


def test_weights_that_go_nowhere_are_an_error_finding(llama):
    class Renamed(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.upward = nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, inputs):
            return self.upward(inputs)

    with pytest.warns(FindingWarning, match="went nowhere"):
        swapped = patchlab.swap(llama, {"LlamaMLP": Renamed})

    assert not swapped.ok
    assert "model.layers.0.mlp.gate_proj.weight" in swapped.report.dropped


def test_state_of_the_random_number_generator_is_left_alone(llama):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    with pytest.warns(FindingWarning):
        patchlab.swap(llama, {"LlamaMLP": WithParameter})

    assert torch.equal(torch.rand(2), expected)


def test_buffer_that_the_new_class_computes_differently_is_its_own(llama):
    class Faster(LlamaRotaryEmbedding):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("inv_freq", 2 * self.inv_freq, persistent=False)

    expected = 2 * llama.model.rotary_emb.inv_freq

    with patchlab.swap(llama, {"LlamaRotaryEmbedding": Faster}):
        assert torch.equal(llama.model.rotary_emb.inv_freq, expected)


def test_buffer_that_only_the_original_class_computes_is_kept():
    class Sub(GPT2Attention):
        pass

    model = gpt2()
    expected = model(tokens()).logits
    buffers = dict(model.named_buffers())

    with patchlab.swap(model, {"GPT2Attention": Sub}):
        assert torch.equal(model(tokens()).logits, expected)
        assert all(b is buffers[name] for name, b in model.named_buffers())


# Conversions


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


def test_conversions_for_another_model_type_are_found(llama):
    with pytest.warns(FindingWarning, match=r"PL305 .*'gpt2'"):
        patchlab.swap(llama, {"LlamaMLP": SubMLP}, conversions=transposed())


# All or nothing


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


def test_parameter_of_the_same_name_and_another_shape_is_refused(llama):
    with pytest.raises(SwapError, match=r"up_proj\.weight has shape \(64, 32\)"):
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
