"""Routers of prediction heads and of other modalities are recorded where they are asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from patchlab.routing import find_routers, record_routing, replay_routing
from tests.routing.families import tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["mtp", "vision_tower"])
def model(request):
    """A model with a further block of experts, in a tower of that name, after its last layer."""
    model = tiny_model("qwen3_moe")
    tower = nn.ModuleList([copy.deepcopy(model.model.layers[0].mlp)])
    model.model.add_module(request.param, tower)
    model.model.norm.register_forward_hook(lambda module, args, hidden: (tower[0](hidden), None)[1])
    return model


def test_routers_of_a_side_tower_are_found_only_where_they_are_asked_for(model):
    plain = [site.fqn for site in find_routers(model)]

    every = [site.fqn for site in find_routers(model, side_towers=True)]

    assert plain == [f"model.layers.{layer}.mlp.gate" for layer in range(3)]
    (tower,) = set(every) - set(plain)
    assert tower in ("model.mtp.0.gate", "model.vision_tower.0.gate")


def test_side_towers_are_recorded_only_where_they_are_asked_for(model):
    with torch.no_grad(), record_routing(model) as plain:
        model(IDS)
    with torch.no_grad(), record_routing(model, side_towers=True) as every:
        model(IDS)

    assert len(plain.layers) == 3
    assert len(every.layers) == 4
    assert every.indices[every.layers[-1]].shape == (16, 2)
    assert all(torch.equal(every.indices[fqn], plain.indices[fqn]) for fqn in plain.layers)


def test_trace_with_side_towers_is_replayed_in_them(model):
    with torch.no_grad(), record_routing(model, side_towers=True) as trace:
        model(IDS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with torch.no_grad(), record_routing(model, side_towers=True) as other:
        model(IDS)
    assert not other.agreement(trace).ok

    replayed, again = replay_routing(model, trace), record_routing(model, side_towers=True)
    with torch.no_grad(), replayed, again as forced:
        model(IDS)

    assert forced.agreement(trace).ok
