"""One step of reinforcement learning: rollout in one precision, training in another.

The rollout runs in bfloat16, as an engine does; the training step in float32. Some tokens would go
to other experts in training than in the rollout. With the routes imposed they do not, and the
gradient differs from the plain one by just that: it is the one that an independent replay, written
by hand for this family, gives.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from patchlab.routing import RoutingTrace, find_routers, record_routing, replay_routing
from tests.routing.families import enable_checkpointing, tiny_model

PROMPT, NEW = 6, 10


@pytest.fixture(scope="module")
def rollout():
    """A policy, sequences it made in bfloat16, their log-probabilities and their routes."""
    policy = tiny_model("qwen3_moe", num_experts=32, num_experts_per_tok=4)
    engine = copy.deepcopy(policy).to(torch.bfloat16)
    prompts = torch.randint(3, 100, (4, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[0, :2] = 0
    torch.manual_seed(0)
    with torch.no_grad(), record_routing(engine) as trace:
        sequences = engine.generate(
            prompts, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True
        )
    full = torch.cat([mask, torch.ones(4, NEW, dtype=torch.int64)], dim=1)
    with torch.no_grad(), replay_routing(engine, trace):
        old = log_probabilities(engine, sequences, full)
    return policy, sequences, full, trace, old


def log_probabilities(model, sequences, mask):
    logits = model(sequences, attention_mask=mask).logits[:, :-1].float()
    return F.log_softmax(logits, -1).gather(-1, sequences[:, 1:, None]).squeeze(-1)


def loss_of(model, sequences, mask, old):
    """A clipped policy-gradient loss over the generated tokens."""
    advantages = torch.tensor([1.0, -0.5, 0.3, -0.8])[:, None]
    ratio = (log_probabilities(model, sequences, mask) - old).exp()[:, PROMPT - 1 :]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def gradients_of(loss, model):
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def distance(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_step_with_the_experts_of_the_rollout(rollout):
    policy, sequences, mask, trace, old = rollout
    model = copy.deepcopy(policy)

    plain = gradients_of(loss_of(model, sequences, mask, old), model)
    with record_routing(model) as live, torch.no_grad():
        log_probabilities(model, sequences, mask)
    assert not trace.agreement(live).ok, "the precisions must disagree, to prove anything"

    with replay_routing(model, trace), record_routing(model) as imposed:
        loss = loss_of(model, sequences, mask, old)
    replayed = gradients_of(loss, model)
    assert trace.agreement(imposed).ok
    assert distance(replayed, plain) > 1e-5
    assert distance(replayed, gradients_of(by_hand(model, rollout), model)) < 1e-6

    # Where the routes are the step's own, imposing them changes nothing.
    with replay_routing(model, live):
        same = gradients_of(loss_of(model, sequences, mask, old), model)
    assert distance(same, plain) < 1e-6


def by_hand(model, rollout):
    """The same loss with the rollout's experts, replayed by code written for this one router."""
    _, sequences, mask, trace, old = rollout
    sites = {site.fqn: site.module for site in find_routers(model)}
    own = {}
    for fqn, gate in sites.items():
        rows = trace.indices[fqn].long().unflatten(0, (4, PROMPT + NEW - 1))
        last = torch.full((4, 1, gate.top_k), -1)
        forced = torch.cat([rows, last], dim=1).flatten(0, 1)

        def forward(hidden_states, gate=gate, forced=forced):
            logits = F.linear(hidden_states, gate.weight)
            scores = logits.softmax(-1)
            live = scores.topk(gate.top_k, dim=-1).indices
            index = torch.where(forced < 0, live, forced)
            weights = scores.gather(-1, index)
            return logits, weights / weights.sum(-1, keepdim=True), index

        own[fqn], gate.forward = gate.forward, forward
    try:
        return loss_of(model, sequences, mask, old)
    finally:
        for gate in sites.values():
            del gate.forward


def test_every_router_learns_and_stays_on_the_routes(rollout):
    """After a step of the optimizer the routers have moved; the imposed experts have not."""
    policy, sequences, mask, trace, old = rollout
    model = enable_checkpointing(copy.deepcopy(policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {site.fqn: site.module.weight.detach().clone() for site in find_routers(model)}
    for _ in range(2):
        optimizer.zero_grad()
        with replay_routing(model, trace), record_routing(model) as imposed:
            loss_of(model, sequences, mask, old).backward()
        optimizer.step()
        assert trace.agreement(imposed).ok

    for site in find_routers(model):
        assert not torch.equal(site.module.weight, before[site.fqn])


def test_engine_arrays_give_the_same_step(rollout):
    """The routes as an engine returns them, one array for each request, give the same loss."""
    policy, sequences, mask, trace, old = rollout
    model = copy.deepcopy(policy)
    arrays = [trace.sequence(number).to_vllm() for number in range(4)]
    assert arrays[0].shape == (PROMPT + NEW - 1 - 2, 3, 4)

    with torch.no_grad():
        with replay_routing(model, trace):
            expected = loss_of(model, sequences, mask, old)
        with replay_routing(model, RoutingTrace.from_vllm(model, arrays)):
            loss = loss_of(model, sequences, mask, old)

    assert torch.equal(loss, expected)
