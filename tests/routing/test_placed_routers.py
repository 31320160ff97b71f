"""Routers that a patch put there: found by where they are, whatever their class is called."""

import pytest
import torch

import patchlab
from patchlab.errors import RoutingError
from patchlab.routing import find_routers, record_routing, replay_routing
from tests.routing.families import tiny_model

IDS = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(1))


class Chooser(torch.nn.Module):
    """A router of the user's own, under a name that says nothing."""

    def __init__(self, config):
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_tok, config.num_experts
        self.weight = torch.nn.Parameter(torch.randn(self.num_experts, config.hidden_size))

    def forward(self, hidden_states):
        logits = hidden_states.reshape(-1, self.weight.shape[1]) @ self.weight.T
        weights, index = torch.topk(logits.softmax(-1), self.top_k)
        return logits, weights, index


def test_replaced_router_of_any_name_is_found_where_it_is():
    with patchlab.patched({"Qwen3MoeTopKRouter": Chooser}):
        model = tiny_model("qwen3_moe")
    assert [site.class_name for site in find_routers(model)] == ["Chooser"] * 3
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS)
        with replay_routing(model, trace, strict=True):
            model(IDS)

    assert trace.num_tokens == 2 * IDS.numel()


def test_projection_that_is_called_gate_is_no_router():
    """Guards the test above: in a dense layer `gate` may be a plain projection."""
    dense = torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2), "router": torch.nn.Linear(2, 2)})
    with pytest.raises(RoutingError, match="no router"):
        find_routers(dense)
