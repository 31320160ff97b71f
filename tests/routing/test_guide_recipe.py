"""The recipe of the transformers guide to monkey patching, as written, beside the generic way."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.monkey_patching import (
    apply_patches,
    register_patch_mapping,
    unregister_patch_mapping,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder

from patchlab.routing import (
    RoutingTrace,
    record_routing,
    replay_routing,
    string_keyed_recorders,
)
from tests.routing.families import tiny_config, tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


class ReplayableQwen3MoeTopKRouter(Qwen3MoeTopKRouter):
    _forced_indices: torch.Tensor | None = None

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight)
        router_logits = F.softmax(router_logits, dtype=torch.float, dim=-1)

        if self._forced_indices is not None:
            router_indices = self._forced_indices.to(router_logits.device).long()
            # Megatron-style replay: preserve expert path, recompute current scores
            router_top_value = router_logits.gather(-1, router_indices)
        else:
            router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)

        if self.norm_topk_prob:
            router_top_value = router_top_value / router_top_value.sum(dim=-1, keepdim=True)
        return router_logits, router_top_value.to(router_logits.dtype), router_indices


@contextmanager
def replay_moe_routing(model, selected_experts_per_layer):
    routers = [m for m in model.modules() if isinstance(m, ReplayableQwen3MoeTopKRouter)]
    if len(routers) != len(selected_experts_per_layer):
        raise ValueError(
            f"Got {len(routers)} routers but {len(selected_experts_per_layer)} tensors"
        )
    for r, t in zip(routers, selected_experts_per_layer):  # noqa: B905
        r._forced_indices = t
    try:
        yield
    finally:
        for r in routers:
            r._forced_indices = None


@pytest.fixture
def model():
    """Built as the guide builds it, with routers that have something to choose."""
    register_patch_mapping({"Qwen3MoeTopKRouter": ReplayableQwen3MoeTopKRouter})
    try:
        with apply_patches():
            model = Qwen3MoeForCausalLM(tiny_config("qwen3_moe")).eval()
    finally:
        unregister_patch_mapping(["Qwen3MoeTopKRouter"])
    model.load_state_dict(tiny_model("qwen3_moe").state_dict())
    return model


@pytest.fixture
def recorders():
    """Puts back the registry's entries: the guide's own code leaves its entry there for good."""
    before = dict(_CAN_RECORD_REGISTRY)
    yield
    dict.clear(_CAN_RECORD_REGISTRY)
    dict.update(_CAN_RECORD_REGISTRY, before)


def recipe_of_the_guide(model):
    inner = model.model
    existing = _CAN_RECORD_REGISTRY.get(str(inner.__class__), {}) or {}
    _CAN_RECORD_REGISTRY[str(inner.__class__)] = {
        **existing,
        "selected_experts": OutputRecorder(ReplayableQwen3MoeTopKRouter, index=2),
    }
    captured = inner(input_ids=IDS, output_selected_experts=True)
    return captured.selected_experts


def test_recipe_runs_as_written_and_agrees_with_the_generic_way(model, recorders):
    with torch.no_grad(), string_keyed_recorders():
        with record_routing(model) as trace:
            selected_experts = recipe_of_the_guide(model)
        plain = model.model(input_ids=IDS).last_hidden_state
        with replay_moe_routing(model.model, list(selected_experts)):
            guide = model.model(input_ids=IDS).last_hidden_state

    assert len(selected_experts) == 3
    for fqn, index in zip(trace.layers, selected_experts, strict=True):
        assert torch.equal(trace.indices[fqn].long(), index)
    with torch.no_grad(), replay_routing(model, trace):
        generic = model.model(input_ids=IDS).last_hidden_state
    assert torch.allclose(guide, plain, atol=1e-6)
    assert torch.allclose(generic, guide, atol=1e-6)


def test_both_ways_impose_the_same_foreign_routes(model):
    other = tiny_model("qwen3_moe", seed=9)
    with torch.no_grad(), record_routing(other) as trace:
        other(IDS)
    with torch.no_grad():
        with replay_moe_routing(model, trace.to_list()), record_routing(model) as imposed:
            guide = model(IDS).logits
        with replay_routing(model, trace):
            generic = model(IDS).logits

    assert torch.allclose(guide, generic, atol=1e-6)
    # A router that is handed its experts makes no choice; what it returns is recorded.
    assert imposed.agreement(trace).ok


def test_list_of_the_guide_is_taken_as_it_is(model, recorders):
    with torch.no_grad(), string_keyed_recorders():
        selected_experts = recipe_of_the_guide(model)
        stock = tiny_model("qwen3_moe")
        with replay_routing(stock, list(selected_experts)), record_routing(stock) as trace:
            stock(IDS)

    assert trace.agreement(RoutingTrace.from_list(stock, selected_experts)).ok


def test_registry_is_its_own_again_after_the_block(recorders):
    own = type(_CAN_RECORD_REGISTRY)
    with pytest.raises(ZeroDivisionError), string_keyed_recorders(), string_keyed_recorders():
        _CAN_RECORD_REGISTRY["key"] = {"a": 1}
        assert _CAN_RECORD_REGISTRY.get("key", {}) == {"a": 1}
        assert _CAN_RECORD_REGISTRY.get("nothing", {}) == {}
        raise ZeroDivisionError

    assert type(_CAN_RECORD_REGISTRY) is own


def test_models_are_looked_up_inside_the_block_as_outside(model):
    """Guards the shim: what transformers itself asks for is answered as before."""
    outside = model.model(input_ids=IDS, output_router_logits=True).router_logits
    with string_keyed_recorders():
        inside = model.model(input_ids=IDS, output_router_logits=True).router_logits

    assert len(inside) == len(outside) == 3
