"""Weights kept elsewhere: accelerate's hooks put a forward on each module, and meta tensors in."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules

from patchlab.routing import find_routers, record_routing, replay_routing
from tests.routing.families import output, tiny_model, tokens

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
# A router of its own, one in a block, groups, two towers, a mixer.
FAMILIES = ("qwen3_moe", "doge", "deepseek_v3", "switch_transformers", "phimoe")


def run(model):
    with torch.no_grad():
        return output(model, {**tokens(model), "input_ids": IDS})


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def recorded(model):
    with record_routing(model) as trace:
        logits = run(model)
    return trace, logits


def test_offloaded_model_is_recorded_and_replayed_like_one_that_is_not(family):
    model = tiny_model(family)
    other, _ = recorded(tiny_model(family, seed=9))
    expected, plain = recorded(model)
    with replay_routing(model, other):
        imposed = run(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())

    trace, logits = recorded(model)
    with replay_routing(model, other), record_routing(model) as again:
        logits_again = run(model)

    assert trace.agreement(expected).ok
    assert torch.equal(logits, plain)
    assert again.agreement(other).ok
    assert torch.equal(logits_again, imposed)


def test_dispatched_model_is_what_it_was_after_the_block():
    model = tiny_model("qwen3_moe")
    expected, _ = recorded(model)
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    gates = [site.module for site in find_routers(model)]
    placed = [gate.forward for gate in gates]

    trace, _ = recorded(model)

    assert trace.agreement(expected).ok
    assert [gate.forward for gate in gates] == placed
    remove_hook_from_submodules(model)
    assert recorded(model)[0].agreement(expected).ok


def test_copy_of_an_offloaded_model_made_in_the_block_has_routers_of_its_own():
    model = tiny_model("qwen3_moe")
    expected, plain = recorded(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with record_routing(model) as trace:
        other = copy.deepcopy(model)
        theirs, logits = recorded(other)

    assert not trace.num_tokens
    assert theirs.agreement(expected).ok
    assert torch.equal(logits, plain)
