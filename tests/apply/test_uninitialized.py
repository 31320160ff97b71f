"""What a load leaves as uninitialized memory is told by the scope, and by nothing else."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from patchlab.errors import FindingWarning
from tests.toys import llama_config


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))


class Grown(LlamaMLP):
    """Has a parameter, a part with one, a constant, and a projection that the model initializes."""

    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.full((4,), 7.0))
        self.gate = Gate()
        self.extra = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(3.0), persistent=False)


class Careful(Grown):
    def init_new_weights(self):
        init.constant_(self.gain, 7.0)
        init.constant_(self.gate.scale, 0.0)
        init.copy_(self.steps, torch.arange(3.0))


class Failing(Grown):
    def init_new_weights(self):
        raise ZeroDivisionError("in the middle of a load")


@pytest.fixture
def folder(tmp_path):
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    return tmp_path


def load(folder, mapping):
    with patchlab.patched(mapping, on_finding="ignore") as report:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, report


def told(report):
    return [(f.code, f.severity, f.subject) for f in report.findings]


def test_what_nothing_initializes_is_an_error_of_the_report(folder):
    _, report = load(folder, {"LlamaMLP": Grown})
    assert told(report) == [
        ("PL301", "error", "Grown"),
        ("PL303", "error", "Grown"),
        ("PL301", "warning", "Grown"),
    ]
    weights, constants, projection = (f.message for f in report.findings)
    assert weights.startswith("gain and gate.scale of Grown are not in the checkpoint")
    assert constants.startswith("steps of Grown is computed in the constructor")
    assert projection.startswith("extra.weight and extra.bias of Grown are not in the checkpoint")
    assert "at random" in projection
    assert not report.ok


def test_a_scope_warns_of_it(folder):
    with pytest.warns(FindingWarning) as caught, patchlab.patched({"LlamaMLP": Grown}):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "gain and gate.scale" in str(caught[0].message)
    assert isinstance(model.model.layers[0].mlp, Grown)


def test_what_the_replacement_initializes_is_as_it_should_be_and_nothing_is_told(folder):
    model, report = load(folder, {"LlamaMLP": Careful})
    assert report.ok
    assert told(report) == []
    for layer in model.model.layers:
        assert torch.equal(layer.mlp.gain, torch.full((4,), 7.0))
        assert torch.equal(layer.mlp.steps, torch.arange(3.0))


@pytest.mark.parametrize("build", ["from_config", "constructor"])
def test_a_model_that_is_not_loaded_has_what_its_constructors_gave_it(build):
    with patchlab.patched({"LlamaMLP": Grown}, on_finding="ignore") as report:
        if build == "from_config":
            model = transformers.AutoModelForCausalLM.from_config(llama_config())
        else:
            model = transformers.LlamaForCausalLM(llama_config())
    assert told(report) == []
    assert torch.equal(model.model.layers[0].mlp.gain, torch.full((4,), 7.0))


def test_a_checkpoint_that_has_it_is_loaded_and_nothing_is_told(folder, tmp_path):
    model, _ = load(folder, {"LlamaMLP": Careful})
    with torch.no_grad():
        model.model.layers[0].mlp.gain.fill_(3.0)
    model.save_pretrained(tmp_path / "grown")
    again, report = load(tmp_path / "grown", {"LlamaMLP": Grown})
    assert told(report) == [("PL303", "error", "Grown")]  # no checkpoint has a constant
    assert torch.equal(again.model.layers[0].mlp.gain, torch.full((4,), 3.0))


def test_an_error_in_the_middle_of_a_load_comes_through(folder):
    with (
        pytest.raises(ZeroDivisionError, match="in the middle"),
        patchlab.patched({"LlamaMLP": Failing}, on_finding="ignore"),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    model, report = load(folder, {"LlamaMLP": Careful})
    assert told(report) == []
    assert torch.equal(model.model.layers[0].mlp.gain, torch.full((4,), 7.0))


def test_what_is_registered_warns_at_the_load_itself(folder):
    patchlab.register_patch_mapping({"LlamaMLP": Grown})
    try:
        with pytest.warns(FindingWarning) as caught:
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            transformers.AutoModelForCausalLM.from_config(llama_config())
    finally:
        patchlab.unregister_patch_mapping(["LlamaMLP"])
    assert {str(w.message).partition(" ")[0] for w in caught} == {"PL301", "PL303"}


def test_a_model_that_is_not_patched_is_none_of_a_scopes_business(folder):
    class Own(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.mine = nn.Parameter(torch.ones(2))

    with patchlab.patched({"LlamaAttention": Grown}, on_finding="ignore") as report:
        Own.from_pretrained(folder, config=llama_config(num_hidden_layers=0))
    assert "PL301" not in [f.code for f in report.findings]


@settings(max_examples=12, deadline=None)
@given(
    names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True),
    data=st.data(),
)
def test_just_what_is_not_initialized_is_named(tmp_path_factory, names, data):
    wanted = set(data.draw(st.lists(st.sampled_from(names), unique=True)))

    class Drawn(LlamaMLP):
        def __init__(self, config):
            super().__init__(config)
            for name in names:
                setattr(self, f"new_{name}", nn.Parameter(torch.ones(2)))

        def init_new_weights(self):
            for name in wanted:
                init.ones_(getattr(self, f"new_{name}"))

    folder = tmp_path_factory.mktemp("drawn")
    transformers.LlamaForCausalLM(llama_config(num_hidden_layers=1)).save_pretrained(folder)
    _, report = load(folder, {"LlamaMLP": Drawn})
    left = {item.name.removeprefix("new_") for model in report.models for item in model.left}
    assert left == set(names) - wanted
