"""What a module carries beside its weights, and what a swap has to say about it."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import patchlab
from patchlab.errors import FindingWarning
from tests.toys import SubAttention, SubMLP, llama_config, tokens

BOTH = {"LlamaMLP": SubMLP, "LlamaAttention": SubAttention}


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config()).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_training_flag_dtype_and_requires_grad_are_those_of_the_old_module(llama, dtype):
    llama.to(dtype)
    llama.model.layers[0].mlp.requires_grad_(False)
    llama.model.layers[1].mlp.train()
    llama.model.layers[1].mlp.down_proj.eval()

    with patchlab.swap(llama, BOTH):
        first, second = llama.model.layers[0].mlp, llama.model.layers[1].mlp
        assert not any(p.requires_grad for p in first.parameters())
        assert all(p.requires_grad for p in second.parameters())
        assert {p.dtype for p in llama.parameters()} == {dtype}
        assert (first.training, second.training, second.down_proj.training) == (False, True, False)


def test_new_parameter_has_the_dtype_of_the_old_module(llama):
    class WithParameter(SubMLP):
        def __init__(self, config):
            super().__init__(config)
            self.gain = nn.Parameter(torch.ones(2))

    llama.bfloat16()
    llama.requires_grad_(False)

    with pytest.warns(FindingWarning, match="gain"):
        patchlab.swap(llama, {"LlamaMLP": WithParameter})

    assert llama.model.layers[0].mlp.gain.dtype == torch.bfloat16
    assert not llama.model.layers[0].mlp.gain.requires_grad


def test_mode_that_is_set_during_the_swap_stays(llama):
    with patchlab.swap(llama, BOTH):
        llama.train()

    assert all(module.training for module in llama.modules())


def test_hook_runs_on_the_new_module_and_its_handle_still_removes_it(llama):
    seen = []
    mlp = llama.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda *args: seen.append("after"))
    mlp.down_proj.register_forward_pre_hook(lambda *args: seen.append("before"))

    with patchlab.swap(llama, BOTH) as swapped:
        llama(tokens())
        assert seen == ["before", "after"]
        assert not swapped.findings
        handle.remove()
        llama(tokens())
        assert seen == ["before", "after", "before"]

    llama(tokens())
    assert seen == ["before", "after", "before", "before"]


def test_hook_registered_during_the_swap_is_there_after_it(llama):
    seen = []
    with patchlab.swap(llama, BOTH):
        llama.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(1))

    llama(tokens())

    assert seen == [1]


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


def test_accelerate_hook_moves_to_the_new_module(llama):
    hooks = pytest.importorskip("accelerate.hooks")
    seen = []

    class Noting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    hooks.add_hook_to_module(llama.model.layers[0].mlp, Noting())

    with patchlab.swap(llama, BOTH):
        llama(tokens())
    llama(tokens())

    assert seen == ["SubMLP", "LlamaMLP"]


def test_forward_that_was_set_on_the_instance_is_reported(llama):
    mlp = llama.model.layers[0].mlp
    mlp.forward = mlp.forward

    with pytest.warns(FindingWarning, match="forward function set on the instance"):
        patchlab.swap(llama, BOTH)


def test_optimizer_over_shared_parameters_stays_valid(llama):
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)

    with patchlab.swap(llama, BOTH) as swapped:
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


def test_live_config_is_seen_by_the_new_modules(llama):
    with patchlab.swap(llama, BOTH):
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


# Tied weights


class Head(nn.Linear):
    pass


class WrappedHead(nn.Module):
    @classmethod
    def from_original(cls, original):
        wrapped = cls()
        wrapped.proj = original
        return wrapped

    def forward(self, inputs):
        return self.proj(inputs)


class FreshHead(nn.Module):
    def __init__(self, in_features, out_features, bias):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, inputs):
        return inputs @ self.matrix.T


def only_head(cls):
    """Build a mapping for the head's own class, so that no other Linear is meant."""
    return {"LMHead": cls}


@pytest.fixture
def tied():
    class LMHead(nn.Linear):
        pass

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True)).eval()
    model.lm_head = LMHead(32, 64, bias=False)
    model.tie_weights()
    return model


def test_tied_head_stays_tied(tied):
    swapped = patchlab.swap(tied, only_head(Head))

    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert [finding.code for finding in swapped.findings] == ["PL304"]
    assert swapped.findings[0].severity == "info"


def test_head_that_wraps_the_tied_weight_is_told_to_lose_it_on_reload(tied):
    with pytest.warns(FindingWarning, match=r"PL304 .*'proj\.weight'.*without the patch"):
        patchlab.swap(tied, only_head(WrappedHead))

    assert tied.lm_head.proj.weight is tied.model.embed_tokens.weight


def test_head_that_breaks_the_tie_is_told_how_to_untie(tied):
    with pytest.warns(FindingWarning) as told:
        patchlab.swap(tied, only_head(FreshHead))

    assert any("tie_word_embeddings = False" in str(w.message) for w in told)


def test_swapped_model_can_be_copied(llama):
    with patchlab.swap(llama, BOTH):
        again = copy.deepcopy(llama)

    assert torch.equal(again(tokens()).logits, llama(tokens()).logits)
    assert type(again.model.layers[0].mlp) is SubMLP
