"""Gradient checkpointing: one record of each forward, a recompute that sees the same experts."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from patchlab.errors import RoutingError
from patchlab.routing import record_routing, replay_routing
from tests.routing.families import enable_checkpointing, output, tiny_model, tokens

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
# Each kind of choice: topk, groups, argmax (one and two), look-up table, product keys, mixer.
KINDS = [
    "qwen3_moe",
    "deepseek_v2",
    "switch_transformers",
    "nllb-moe",
    "deepseek_v4",
    "doge",
    "phimoe",
]


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def foreign_trace(family, inputs):
    other = tiny_model(family, seed=9)
    with torch.no_grad(), record_routing(other) as trace:
        output(other, inputs)
    return trace


def loss_of(model, inputs):
    torch.manual_seed(0)  # Dropout, jitter and dropped layers are the same each time.
    return output(model, inputs).float().pow(2).mean()


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_those_without(family, use_reentrant):
    """Recorded or replayed, in the scope or after it: the gradients are those of no checkpoint."""
    model = tiny_model(family).train()
    inputs = tokens(model)
    trace = foreign_trace(family, inputs)
    with replay_routing(model, trace):
        loss_of(model, inputs).backward()
    replayed = gradients(model)
    loss_of(model, inputs).backward()
    live = gradients(model)

    enable_checkpointing(model, use_reentrant)
    with replay_routing(model, trace), record_routing(model) as record:
        loss_of(model, inputs).backward()
    assert same(gradients(model), replayed)
    assert record.agreement(trace).ok
    with replay_routing(model, trace):
        loss = loss_of(model, inputs)
    loss.backward()
    assert same(gradients(model), replayed)
    with record_routing(model) as record:
        loss_of(model, inputs).backward()
    assert same(gradients(model), live)
    assert record.num_sequences == 2


def test_live_and_replayed_gradients_differ():
    """Guards the tests here: with equal gradients they could not tell the one from the other."""
    model = tiny_model("qwen3_moe").train()
    trace = foreign_trace("qwen3_moe", {"input_ids": IDS})
    with replay_routing(model, trace):
        model(IDS).logits.pow(2).mean().backward()
    replayed = gradients(model)
    model(IDS).logits.pow(2).mean().backward()

    assert not same(gradients(model), replayed)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_in_another_thread_after_another_forward(use_reentrant):
    """Backward comes late, in a thread that knows no scope, after a forward with other routes."""
    model = tiny_model("qwen3_moe").train()
    trace = foreign_trace("qwen3_moe", {"input_ids": IDS})
    with replay_routing(model, trace):
        model(IDS).logits.pow(2).mean().backward()
    expected = gradients(model)

    enable_checkpointing(model, use_reentrant)
    with replay_routing(model, trace):
        loss = model(IDS).logits.pow(2).mean()
    with record_routing(model):
        model(IDS.flip(0))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()

    assert same(gradients(model), expected)


def test_checkpointing_enabled_inside_the_scope_is_seen():
    model = tiny_model("qwen3_moe").train()
    trace = foreign_trace("qwen3_moe", {"input_ids": IDS})
    with replay_routing(model, trace):
        model(IDS).logits.pow(2).mean().backward()
    expected = gradients(model)

    with replay_routing(model, trace):
        enable_checkpointing(model, use_reentrant=False)
        own = model.model.layers[0]._gradient_checkpointing_func
        model(IDS).logits.pow(2).mean().backward()

    assert same(gradients(model), expected)
    assert model.model.layers[0]._gradient_checkpointing_func is own


def test_record_is_in_order_and_once():
    """Plain hooks record a checkpointed forward twice, the second time from the last layer on."""
    model = enable_checkpointing(tiny_model("qwen3_moe"), use_reentrant=False)
    with record_routing(model) as trace:
        model(IDS).logits.sum().backward()
        model(IDS[:, :5]).logits.sum().backward()

    assert [block.length for block in trace.blocks["model"]] == [8, 5]


def test_checkpoint_of_unknown_origin_is_refused_when_replaying():
    """What it recomputes cannot be told apart from what runs, so it is refused, in backward."""
    model = tiny_model("qwen3_moe").train()
    trace = foreign_trace("qwen3_moe", {"input_ids": IDS})
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda hidden_states: checkpoint(own, hidden_states, use_reentrant=False)

    with replay_routing(model, trace):
        loss = model(IDS).logits.sum()
        with pytest.raises(RoutingError, match="knows nothing of"):
            loss.backward()


def test_checkpoint_of_unknown_origin_is_recorded_once():
    model = tiny_model("qwen3_moe").train()
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda hidden_states: checkpoint(own, hidden_states, use_reentrant=False)

    with record_routing(model) as trace:
        model(IDS).logits.sum().backward()

    assert trace.num_tokens == 16
