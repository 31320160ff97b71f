"""What a module carries beside its weights, and what a swap has to say about it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from accelerate import hooks
from torch import nn

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention, llama_conversions
from patchlab.errors import FindingWarning
from tests.toys import BuiltAttention, BuiltMLP, SubAttention, SubMLP, tokens


@pytest.fixture(params=["cloned", "constructed"])
def both(request):
    """Replacements that need no constructor, and such that have one of their own."""
    if request.param == "cloned":
        return {"LlamaMLP": SubMLP, "LlamaAttention": SubAttention}
    return {"LlamaMLP": BuiltMLP, "LlamaAttention": BuiltAttention}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_training_flag_dtype_and_requires_grad_are_those_of_the_old_module(both, llama, dtype):
    llama.to(dtype)
    llama.model.layers[0].mlp.requires_grad_(False)
    llama.model.layers[1].mlp.train()
    llama.model.layers[1].mlp.down_proj.eval()

    with patchlab.swap(llama, both):
        first, second = llama.model.layers[0].mlp, llama.model.layers[1].mlp
        assert not any(p.requires_grad for p in first.parameters())
        assert all(p.requires_grad for p in second.parameters())
        assert {p.dtype for p in llama.parameters()} == {dtype}
        assert (first.training, second.training, second.down_proj.training) == (False, True, False)


class Adapted(SubMLP):
    """An adapter beside the weights, and a parameter that is not to be trained."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config.hidden_size))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.adapter = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, inputs):
        return self.gain * super().forward(inputs) + self.adapter(inputs)


@pytest.mark.parametrize("frozen", [False, True])
def test_new_parameter_has_the_dtype_of_the_old_module_and_is_trained_as_its_class_has_it(
    llama, frozen
):
    llama.bfloat16()
    llama.requires_grad_(not frozen)

    with pytest.warns(FindingWarning, match="gain") as told:
        patchlab.swap(llama, {"LlamaMLP": Adapted})

    mlp = llama.model.layers[0].mlp
    assert {p.dtype for p in mlp.parameters()} == {torch.bfloat16}
    trained = {name for name, p in mlp.named_parameters() if p.requires_grad}
    new = {"gain", "adapter.weight", "adapter.bias"}
    assert trained == new | (
        set() if frozen else {f"{n}_proj.weight" for n in ("gate", "up", "down")}
    )
    said = "adapter.bias, adapter.weight and gain require a gradient all the same"
    assert ("modules are frozen" in str(told[0].message)) is frozen
    assert (said in str(told[0].message)) is frozen
    assert len(told) == 1


def test_adapter_in_a_frozen_model_can_be_trained_and_moves(llama):
    llama.requires_grad_(False)
    with pytest.warns(FindingWarning, match="frozen"):
        patchlab.swap(llama, {"LlamaMLP": Adapted})
    optimizer = torch.optim.SGD([p for p in llama.parameters() if p.requires_grad], lr=0.1)
    before = {name: p.clone() for name, p in llama.named_parameters()}

    llama(tokens(), labels=tokens()).loss.backward()
    optimizer.step()

    moved = {name for name, p in llama.named_parameters() if not torch.equal(p, before[name])}
    mlps = [f"model.layers.{number}.mlp" for number in range(2)]
    parts = ("gain", "adapter.weight", "adapter.bias")
    assert moved == {f"{mlp}.{part}" for mlp in mlps for part in parts}


def test_module_whose_new_parameters_are_frozen_by_its_class_is_not_said_to_be_trained(llama):
    """Guards the remark about frozen modules."""

    class Fixed(SubMLP):
        def __init__(self, config):
            super().__init__(config)
            self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)

    llama.requires_grad_(False)
    with pytest.warns(FindingWarning, match="fixed") as told:
        patchlab.swap(llama, {"LlamaMLP": Fixed})
    assert "frozen" not in str(told[0].message)


FROZEN = {
    "none": ([], True, False),
    "fused": (["q_proj", "k_proj", "v_proj"], False, False),
    "other": (["o_proj"], True, False),
    "some": (["q_proj"], True, True),
}


@pytest.mark.parametrize(("frozen", "wanted", "mixed"), FROZEN.values(), ids=FROZEN)
def test_converted_parameter_is_frozen_as_those_it_is_made_from(llama, frozen, wanted, mixed):
    for layer in llama.model.layers:
        for name in frozen:
            layer.self_attn.get_submodule(name).requires_grad_(False)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        swapped = patchlab.swap(
            llama, {"LlamaAttention": FusedLlamaAttention}, conversions=llama_conversions()
        )

    assert llama.model.layers[0].self_attn.qkv_proj.weight.requires_grad is wanted
    assert ["frozen weights" in str(warning.message) for warning in told] == [True] * mixed
    if not mixed:
        llama.model.layers[0].self_attn.o_proj.requires_grad_(True)
        patchlab.swap(llama, {"FusedLlamaAttention": BuiltAttention})
        assert llama.model.layers[0].self_attn.k_proj.weight.requires_grad is wanted
        assert swapped.ok


def test_mode_that_is_set_during_the_swap_stays(both, llama):
    with patchlab.swap(llama, both):
        llama.train()

    assert all(module.training for module in llama.modules())


class Whole(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs


@pytest.mark.parametrize("mapping", [{"LlamaForCausalLM": Whole}, {"LlamaMLP": "Bare"}])
def test_mode_that_is_set_during_the_swap_reaches_parts_that_were_not_there(llama, mapping):
    class Bare(nn.Module):
        @classmethod
        def from_original(cls, original):
            return cls()

        def forward(self, inputs):
            return inputs

    with patchlab.swap(llama, {key: Bare if c == "Bare" else c for key, c in mapping.items()}):
        llama.train()

    assert all(module.training for module in llama.modules())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: setattr(model, "forward", lambda *a, f=model.forward, **k: f(*a, **k)),
        lambda model: model.compile(backend="eager"),
    ],
    ids=["forward", "compile"],
)
def test_root_runs_its_new_forward_whatever_was_put_before_the_old_one(llama, spoil):
    expected = llama(tokens()).logits
    spoil(llama)

    with pytest.warns(FindingWarning, match=r"PL306 .*of the root did not follow"):
        swapped = patchlab.swap(llama, {"LlamaForCausalLM": Whole})

    assert torch.allclose(llama(tokens()).logits, 2 * expected)
    swapped.undo()
    assert torch.allclose(llama(tokens()).logits, expected)


def test_compiled_model_runs_the_new_modules_and_then_the_old_ones(llama):
    class Scaled(SubMLP):
        def forward(self, inputs):
            return 3 * super().forward(inputs)

    compiled = torch.compile(llama, backend="eager")
    before = compiled(tokens()).logits

    with patchlab.swap(compiled, {"LlamaMLP": Scaled}) as swapped:
        assert swapped.replacements[0].fqns[0] == "_orig_mod.model.layers.0.mlp"
        during = compiled(tokens()).logits
        assert torch.allclose(during, llama(tokens()).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(during, before)

    assert torch.allclose(compiled(tokens()).logits, before, rtol=0, atol=1e-5)


def test_hook_runs_on_the_new_module_and_its_handle_still_removes_it(both, llama):
    seen = []
    mlp = llama.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda *args: seen.append("after"))
    mlp.down_proj.register_forward_pre_hook(lambda *args: seen.append("before"))

    with patchlab.swap(llama, both) as swapped:
        llama(tokens())
        assert seen == ["before", "after"]
        assert not swapped.findings
        handle.remove()
        llama(tokens())
        assert seen == ["before", "after", "before"]

    llama(tokens())
    assert seen == ["before", "after", "before", "before"]


def test_hook_registered_during_the_swap_is_there_after_it(both, llama):
    seen = []
    with patchlab.swap(llama, both):
        llama.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(1))

    llama(tokens())

    assert seen == [1]


def test_every_kind_of_hook_is_given_the_new_module(both, llama):
    seen = {}

    def note(kind):
        def hook(module, *args):
            seen[kind] = type(module)

        return hook

    mlp = llama.model.layers[0].mlp
    for kind, register in {
        "forward": mlp.register_forward_hook,
        "forward pre": mlp.register_forward_pre_hook,
        "backward": mlp.register_full_backward_hook,
        "backward pre": mlp.register_full_backward_pre_hook,
        "state dict": mlp.register_state_dict_post_hook,
        "state dict pre": mlp.register_state_dict_pre_hook,
        "load pre": mlp.register_load_state_dict_pre_hook,
        "load post": mlp.register_load_state_dict_post_hook,
    }.items():
        register(note(kind))
    mlp.register_forward_hook(note("with keywords"), with_kwargs=True)
    mlp.register_forward_hook(note("always"), always_call=True)

    with patchlab.swap(llama, both) as swapped:
        llama(tokens(), labels=tokens()).loss.backward()
        llama.load_state_dict(llama.state_dict())
        assert not swapped.findings

    assert len(seen) == 10
    assert set(seen.values()) == {both["LlamaMLP"]}


def test_hook_that_has_no_place_is_reported(llama):
    class Plain(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, inputs):
            return inputs

    llama.model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: None)

    with pytest.warns(FindingWarning) as told:
        patchlab.swap(llama, {"LlamaMLP": Plain})

    assert any("PL306" in str(w.message) and "mlp.down_proj" in str(w.message) for w in told)


def test_accelerate_hook_moves_to_the_new_module(both, llama):
    seen = []

    class Noting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    hooks.add_hook_to_module(llama.model.layers[0].mlp, Noting())

    with patchlab.swap(llama, both):
        llama(tokens())
    llama(tokens())

    assert seen == [both["LlamaMLP"].__name__, "LlamaMLP"]


def test_forward_that_was_set_on_the_instance_is_reported(both, llama):
    mlp = llama.model.layers[0].mlp
    mlp.forward = mlp.forward

    with pytest.warns(FindingWarning, match="forward function set on the instance"):
        patchlab.swap(llama, both)


def test_optimizer_over_shared_parameters_stays_valid(both, llama):
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)

    with patchlab.swap(llama, both) as swapped:
        assert not swapped.findings
        before = llama.model.layers[0].mlp.up_proj.weight.clone()
        llama(tokens(), labels=tokens()).loss.backward()
        optimizer.step()

    assert not torch.equal(llama.model.layers[0].mlp.up_proj.weight, before)


def test_optimizer_that_holds_a_parameter_out_of_use_is_reported(llama):
    class Fresh(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.upward = nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, inputs):
            return self.upward(inputs)

    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)

    with pytest.warns(FindingWarning) as told:
        patchlab.swap(llama, {"LlamaMLP": Fresh})

    assert any("a SGD holds" in str(w.message) for w in told)
    assert optimizer.param_groups


def test_live_config_is_seen_by_the_new_modules(both, llama):
    with patchlab.swap(llama, both):
        assert llama.model.layers[0].self_attn.config is llama.config
        llama.set_attn_implementation("eager")
        assert llama.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_outputs_are_recorded_from_a_replacement_that_is_no_subclass(llama):
    class Unlike(nn.Module):
        def __init__(self, config, layer_idx):
            super().__init__()
            self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

        def forward(self, hidden_states, **kwargs):
            return self.o_proj(hidden_states), torch.ones(2, 4, 5, 5)

    llama.set_attn_implementation("eager")
    with pytest.warns(FindingWarning):
        swapped = patchlab.swap(llama, {"LlamaAttention": Unlike})

    outputs = llama(tokens(), output_attentions=True)
    assert len(outputs.attentions) == 2
    assert outputs.attentions[0].eq(1).all()
    swapped.undo()
    assert not llama(tokens(), output_attentions=True).attentions[0].eq(1).all()
    assert "_can_record_outputs" not in vars(llama.model)


def test_gradient_checkpointing_stays_on(llama):
    class Layer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        pass

    llama.train()
    enable = getattr(llama, "activation_checkpointing_enable", None)  # its name from 5.24 on
    (enable or llama.gradient_checkpointing_enable)()

    with patchlab.swap(llama, {"LlamaDecoderLayer": Layer}):
        layer = llama.model.layers[0]
        assert layer.gradient_checkpointing
        assert layer._gradient_checkpointing_func is not None
        llama(tokens(), labels=tokens()).loss.backward()


def test_swapped_model_can_be_copied(both, llama):
    with patchlab.swap(llama, both):
        again = copy.deepcopy(llama)

    assert torch.equal(again(tokens()).logits, llama(tokens()).logits)
    assert type(again.model.layers[0].mlp) is both["LlamaMLP"]
