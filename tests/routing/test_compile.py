"""torch.compile: right, with a graph break at each router; a whole graph is refused by name."""

import os
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

from patchlab.errors import RoutingError
from patchlab.routing import record_routing, replay_routing
from tests.routing.families import tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def other():
    model = tiny_model("qwen3_moe", seed=9, num_hidden_layers=1)
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS)
    return trace


def compiled(model, backend="eager", **options):
    return torch.compile(model, backend=backend, **options)


def test_compiled_model_is_recorded_and_replayed(other):
    """Compiled before the blocks, run before, inside and after them."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    with torch.no_grad(), record_routing(model) as expected:
        plain = model(IDS).logits
    fast = compiled(model)
    with torch.no_grad():
        fast(IDS)
        with record_routing(fast) as trace:
            assert torch.allclose(fast(IDS).logits, plain, atol=1e-6)
        with replay_routing(fast, other), record_routing(fast) as imposed:
            fast(IDS)
        assert torch.allclose(fast(IDS).logits, plain, atol=1e-6)

    assert trace.layers == expected.layers
    assert trace.agreement(expected).ok
    assert imposed.agreement(other).ok


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # The compiler looks at all tensors.
def test_gradients_of_a_compiled_model_are_those_of_the_model(other):
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    with replay_routing(model, other):
        model(IDS).logits.pow(2).mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # With the graph of backward and what it saves, which "eager" leaves to torch as ever.
    fast = compiled(model, "aot_eager")
    with replay_routing(fast, other):
        fast(IDS).logits.pow(2).mean().backward()

    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.allclose(parameter.grad, expected[name], atol=1e-6), name


class ToyTopKRouter(nn.Module):
    top_k, num_experts = 2, 4

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden):
        scores = (hidden @ self.weight.T).softmax(-1)
        weights, index = torch.topk(scores, self.top_k, dim=-1)
        return torch.zeros_like(scores).scatter(-1, index, weights)


class ToyMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.gate = ToyTopKRouter()
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, input_ids):
        hidden = self.embed(input_ids).flatten(0, 1)
        return torch.einsum("te,td,edf->tf", self.gate(hidden), hidden, self.experts)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own.
def test_machine_code_is_recorded_and_replayed():
    """The default backend, which writes C++: on a toy, since each kernel takes seconds.

    Where no compiler is installed, all of it but the C++.
    """
    model = ToyMoE()
    with torch.no_grad(), record_routing(model) as expected:
        plain = model(IDS)
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
    fast = torch.compile(model, backend="inductor" if has_compiler else "aot_eager")
    with torch.no_grad():
        with record_routing(fast) as trace:
            assert torch.allclose(fast(IDS), plain, atol=1e-5)
        with replay_routing(fast, [torch.tensor([[3, 1]] * 16)]), record_routing(fast) as imposed:
            fast(IDS)

    assert trace.agreement(expected).ok
    assert imposed.indices["gate"].tolist() == [[3, 1]] * 16


def test_whole_graph_is_refused_with_the_reason():
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    fast = compiled(model, fullgraph=True)

    with (
        torch.no_grad(),
        record_routing(fast),
        pytest.raises((Unsupported, RoutingError), match="fullgraph=False"),
    ):
        fast(IDS)


def test_model_compiled_in_place_is_refused():
    """`model.compile()` puts the hooks into the compiled region, where nothing is announced."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    model.compile(backend="eager")

    with pytest.raises(RoutingError, match="compiled in place"), record_routing(model):
        pytest.fail("the block must not run")
