"""Which modules a swap finds, and where it hangs the new ones: traps of walking a changing tree."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import patchlab
from patchlab.errors import NothingReplacedWarning, SwapError, TargetError
from tests.toys import OtherMLP, SubAttention, SubMLP, count, llama_config, tokens


class Wrap(nn.Module):
    """Holds the module whose place it takes."""

    @classmethod
    def from_original(cls, original):
        wrapped = cls()
        wrapped.inner = original
        return wrapped

    def forward(self, *args):
        return self.inner(*args)


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))


def test_replacement_that_holds_its_original_is_put_in_once():
    model = nested()

    swapped = patchlab.swap(model, {"Linear": Wrap})

    assert swapped.counts == {"Linear": 2}
    assert count(model, Wrap) == count(model, nn.Linear) == 2


@pytest.mark.parametrize("replacement", [Wrap, Doubled])
def test_second_swap_of_the_same_mapping_replaces_nothing_and_says_so(replacement):
    model = nested()
    patchlab.swap(model, {"^Linear$": replacement})
    before = list(model.modules())

    with pytest.warns(NothingReplacedWarning, match=f"{replacement.__name__} already"):
        again = patchlab.swap(model, {"^Linear$": replacement})

    assert again.counts == {"^Linear$": 0}
    assert list(model.modules()) == before


def test_entry_of_a_module_list_is_replaced_where_it_is_called():
    model = nn.ModuleDict({"to_out": nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.0)])})
    inputs = torch.ones(1, 4)
    expected = 2 * model["to_out"][0](inputs)

    patchlab.swap(model, {"Linear": Doubled})

    assert torch.equal(model["to_out"][0](inputs), expected)
    assert [name for name, _ in model.named_modules()] == ["", "to_out", "to_out.0", "to_out.1"]


def test_matches_at_any_depth_are_replaced():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))))

    assert patchlab.swap(model, {"Linear": Doubled}).replacements[0].fqns == ("0.0.0",)


def test_root_stays_the_same_object_and_takes_the_new_class():
    model = nn.Linear(4, 4)
    weight, inputs = model.weight, torch.ones(1, 4)
    expected = model(inputs)

    with patchlab.swap(model, {"Linear": Doubled}) as swapped:
        assert swapped.model is model
        assert type(model) is Doubled
        assert model.weight is weight
        assert torch.equal(model(inputs), 2 * expected)

    assert type(model) is nn.Linear
    assert torch.equal(model(inputs), expected)


def test_model_of_transformers_is_replaced_as_the_root():
    class MyModel(transformers.LlamaForCausalLM):
        pass

    model = transformers.LlamaForCausalLM(llama_config()).eval()
    expected, variables = model(tokens()).logits, dict(vars(model))

    with patchlab.swap(model, {"LlamaForCausalLM": MyModel}):
        assert type(model) is MyModel
        assert torch.equal(model(tokens()).logits, expected)

    assert type(model) is transformers.LlamaForCausalLM
    assert vars(model) == variables


def test_module_at_two_paths_becomes_one_module_at_both():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "head": shared})

    swapped = patchlab.swap(model, {"Linear": Doubled})

    assert model["a"][0] is model["head"]
    assert type(model["head"]) is Doubled
    assert swapped.counts == {"Linear": 1}
    assert "1 module, 2 paths" in swapped.report.verdict
    swapped.undo()
    assert model["a"][0] is model["head"] is shared


def test_model_with_a_cycle_is_walked_to_its_end():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].back = model  # type: ignore[assignment]

    with patchlab.swap(model, {"Linear": Wrap}):
        assert type(model[0]) is Wrap


def test_outermost_match_wins_and_its_parts_are_built_under_the_mapping():
    class MyLayer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        pass

    model = transformers.LlamaForCausalLM(llama_config()).eval()
    expected = model(tokens()).logits

    swapped = patchlab.swap(model, {"LlamaDecoderLayer": MyLayer})
    assert swapped.counts == {"LlamaDecoderLayer": 2}
    swapped.undo()
    swapped = patchlab.swap(model, {"LlamaDecoderLayer": MyLayer, "LlamaMLP": SubMLP})

    assert count(model, MyLayer) == count(model, SubMLP) == 2
    assert swapped.counts == {"LlamaDecoderLayer": 2, "LlamaMLP": 2}
    assert swapped.replacements[1].fqns == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert "4 modules replaced" in swapped.report.verdict
    with patchlab.patched({"LlamaDecoderLayer": MyLayer, "LlamaMLP": SubMLP}) as report:
        transformers.LlamaForCausalLM(llama_config())
    assert report.counts == swapped.counts
    assert torch.equal(model(tokens()).logits, expected)


def test_class_of_an_earlier_swap_is_replaced_by_its_own_name():
    model = transformers.LlamaForCausalLM(llama_config()).eval()
    expected = model(tokens()).logits
    first = patchlab.swap(model, {"LlamaMLP": SubMLP})

    second = patchlab.swap(model, {"SubMLP": OtherMLP})

    assert count(model, OtherMLP) == 2
    assert torch.equal(model(tokens()).logits, expected)
    second.undo()
    assert count(model, SubMLP) == 2
    first.undo()
    assert count(model, SubMLP) == 0


def test_undo_out_of_order_is_refused_and_changes_nothing():
    model = transformers.LlamaForCausalLM(llama_config())
    first = patchlab.swap(model, {"LlamaMLP": SubMLP})
    second = patchlab.swap(model, {"SubMLP": OtherMLP})

    with pytest.raises(SwapError, match=r"model\.layers\.0\.mlp is a OtherMLP .* later swap"):
        first.undo()

    assert count(model, OtherMLP) == 2
    second.undo()
    first.undo()
    assert first.undone
    assert count(model, SubMLP) == 0


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda layer: setattr(layer, "mlp", nn.Identity()), r"0\.mlp is a Identity that was put"),
        (lambda layer: delattr(layer, "mlp"), r"0\.mlp is gone: it was taken out"),
    ],
)
def test_undo_after_a_new_module_was_replaced_by_hand_says_so_and_changes_nothing(spoil, told):
    model = transformers.LlamaForCausalLM(llama_config())
    swapped = patchlab.swap(model, {"LlamaMLP": SubMLP})
    spoil(model.model.layers[0])

    with pytest.raises(SwapError, match=told):
        swapped.undo()

    assert type(model.model.layers[1].mlp) is SubMLP
    assert not swapped.undone


def test_root_in_a_cycle_is_replaced_as_the_root():
    model = nn.Linear(4, 4)
    model.back = model  # type: ignore[assignment]

    with patchlab.swap(model, {"Linear": Wrap}):
        assert type(model) is Wrap

    assert type(model) is nn.Linear


def test_models_inside_a_plain_module_are_found():
    model = nn.ModuleDict({"llm": transformers.LlamaModel(llama_config()), "head": nn.Linear(4, 2)})

    with patchlab.swap(model, {"LlamaAttention": SubAttention, "^Linear$": Doubled}) as swapped:
        # The 8 in the two new attentions are built under the mapping, too.
        assert swapped.counts == {"LlamaAttention": 2, "^Linear$": 15}
        assert count(model, Doubled) == 15
        assert model["llm"].layers[0].self_attn.config is model["llm"].config


def test_what_is_no_model_is_refused():
    with pytest.raises(TargetError, match="swap takes a model, got str"):
        patchlab.swap("model", {"Linear": Doubled})  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [True, False])
def test_root_that_is_wrapped_runs_and_is_undone(train):
    """The root stays the same object, so what wraps it cannot hold that object as the old one."""
    model = nn.Linear(4, 4).eval()
    inputs, calls = torch.ones(2, 4), []
    model.register_forward_hook(lambda *args: calls.append(1))
    expected, attributes = model(inputs), vars(model)

    swapped = patchlab.swap(model, {"Linear": Wrap})
    assert type(model) is Wrap
    assert type(model.inner) is nn.Linear
    assert model.inner is not model
    calls.clear()
    assert torch.equal(model(inputs), expected)
    assert calls == [1]
    model.train(train)
    model.double()
    assert [*model.state_dict()] == ["inner.weight", "inner.bias"]
    swapped.undo()

    assert type(model) is nn.Linear
    assert vars(model) is attributes
    assert model.training is train
    assert model.weight.dtype is torch.float64
    assert torch.equal(model.float()(inputs), expected)


def test_model_of_transformers_that_is_wrapped_itself_runs():
    model = transformers.LlamaModel(llama_config()).eval()
    expected = model(tokens()).last_hidden_state

    with patchlab.swap(model, {"LlamaModel": Wrap}, on_finding="ignore"):
        assert torch.equal(model(tokens()).last_hidden_state, expected)
        assert count(model, Wrap) == count(model, transformers.LlamaModel) == 1

    assert type(model) is transformers.LlamaModel
    assert torch.equal(model(tokens()).last_hidden_state, expected)


def test_class_that_was_defined_again_is_told_from_one_that_is_not_there():
    """The cell with the class and the swap in it is run twice."""

    def define():
        return type("Again", (transformers.models.llama.modeling_llama.LlamaMLP,), {})

    model = transformers.LlamaModel(llama_config())
    first = patchlab.swap(model, {"LlamaMLP": define()})
    newer = define()
    with pytest.warns(NothingReplacedWarning, match="2 of the modules here are of a class Again"):
        second = patchlab.swap(model, {"LlamaMLP": newer})
    (finding,) = second.findings
    assert finding.suggestion == "Again"

    third = patchlab.swap(model, {finding.suggestion: newer})
    assert count(model, newer) == 2
    third.undo()
    first.undo()
    assert patchlab.swap(model, {"LlamaMLP": newer}).counts == {"LlamaMLP": 2}


def test_class_that_was_patched_when_the_model_was_built_is_named():
    with patchlab.patched({"LlamaMLP": SubMLP}):
        model = transformers.LlamaModel(llama_config())
    with pytest.warns(NothingReplacedWarning, match="has SubMLP, a subclass of LlamaMLP"):
        (finding,) = patchlab.swap(model, {"LlamaMLP": OtherMLP}).findings

    assert patchlab.swap(model, {finding.suggestion: OtherMLP}).counts == {"SubMLP": 2}


def test_key_of_no_class_is_not_explained_by_the_base_of_all_modules():
    """Guards the test above: every class is derived from Module."""
    with pytest.warns(NothingReplacedWarning, match="key 'Module' replaced no module"):
        swapped = patchlab.swap(nn.Sequential(nn.Linear(2, 2)), {"Module": Doubled})
    assert "a subclass of" not in swapped.findings[0].message
