"""Replay: the experts of a trace, the arithmetic of the model, a refusal of what does not fit."""

import pytest
import torch
from transformers import DynamicCache

from patchlab.errors import RoutingError
from patchlab.routing import RoutingTrace, find_routers, record_routing, replay_routing
from tests.routing.families import tiny_model, with_cache

IDS = torch.randint(3, 100, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def other():
    """The same architecture with other weights, so that it routes otherwise."""
    return tiny_model("qwen3_moe", seed=9)


def recorded(model, *args, **options):
    with torch.no_grad(), record_routing(model) as trace:
        model(*args, **options)
    return trace


def replayed(model, trace, *args, **options):
    """Replay a trace over one forward and record what was imposed."""
    strict = options.pop("strict", False)
    with torch.no_grad(), replay_routing(model, trace, strict=strict), record_routing(model) as out:
        model(*args, **options)
    return out


def test_other_weights_take_the_experts_of_the_trace(model, other):
    trace = recorded(model, IDS)
    assert not trace.agreement(recorded(other, IDS)).ok

    assert trace.agreement(replayed(other, trace, IDS)).ok


def test_scores_are_those_of_the_live_router(model, other):
    """The weights of the imposed experts are what the model's own code makes of live scores."""
    trace = recorded(model, IDS)
    gate = other.model.layers[0].mlp.gate
    seen = {}
    handle = gate.register_forward_hook(lambda module, args, out: seen.update(out=out, x=args[0]))
    with torch.no_grad(), replay_routing(other, trace):
        other(IDS)
    handle.remove()

    logits, weights, index = seen["out"]
    scores = torch.softmax(seen["x"] @ gate.weight.T, dim=-1, dtype=torch.float).gather(-1, index)
    assert torch.equal(index, trace.indices[trace.layers[0]].long())
    assert torch.allclose(weights, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype))
    assert torch.allclose(logits, seen["x"] @ gate.weight.T)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"])
def test_groups_are_chosen_with_their_experts(family):
    """Experts outside the groups a router would choose have weights and gradients all the same.

    These routers mask the scores of other groups with zeros, before the weights are taken of them.
    """
    model = tiny_model(family)
    sites = find_routers(model)
    assert all(site.num_groups == 2 and site.top_k_groups == 1 for site in sites)
    live = recorded(model, IDS)
    opposite = [(index + 4) % 8 for index in live.to_list()]
    weights, logits = [], []

    def keep(module, args, out):
        out[0].retain_grad()
        logits.append(out[0])
        weights.append(out[1])

    handles = [site.module.register_forward_hook(keep) for site in sites]
    with replay_routing(model, opposite), record_routing(model) as imposed:
        out = model(IDS)
    (out.logits if hasattr(out, "logits") else out.last_hidden_state).pow(2).mean().backward()
    for handle in handles:
        handle.remove()

    assert imposed.agreement(RoutingTrace.from_list(model, opposite)).ok
    for weight, logit in zip(weights, logits, strict=True):
        assert bool((weight > 0).all())
        assert bool((logit.grad.abs().sum(-1) > 0).all())


def test_base_model_takes_the_trace_of_its_head(model, other):
    trace = recorded(model, IDS)

    with torch.no_grad(), replay_routing(other.model, trace) as renamed:
        other.model(IDS)
        assert renamed.layers == tuple(site.fqn for site in find_routers(other.model))
    assert trace.agreement(replayed(other.model, trace, IDS)).ok


def test_generation_is_replayed_over_what_was_generated(model, other):
    """The last token of each sequence was never run, and is routed live."""
    with torch.no_grad(), record_routing(model) as trace:
        sequences = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert sequences.shape[1] == trace.blocks["model"][0].length + 1

    out = replayed(other, trace, sequences)

    assert trace.agreement(out).ok
    assert all(bool((index >= 0).all()) for index in out.indices.values())
    with pytest.raises(RoutingError, match="1 token without a route"):
        replayed(other, trace, sequences, strict=True)


def test_generation_takes_the_experts_step_by_step(model, other):
    """Over a cache each forward takes the next tokens of its sequences."""
    with torch.no_grad(), record_routing(model) as trace:
        model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}

    with torch.no_grad(), replay_routing(other, trace), record_routing(other) as out:
        other.generate(IDS, **options)
    assert trace.agreement(out).ok
    with torch.no_grad(), replay_routing(other, trace), pytest.raises(RoutingError, match="ends"):
        other.generate(IDS, **{**options, "max_new_tokens": 8, "min_new_tokens": 8})


def test_padding_may_be_on_the_other_side(model, other):
    """A rollout padded on the left and a training step padded on the right are the same tokens."""
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    mask[1, :1] = 0
    trace = recorded(model, IDS, attention_mask=mask)
    right, right_mask = torch.zeros_like(IDS), torch.zeros_like(mask)
    for row, (ids, real) in enumerate(zip(IDS, mask.bool(), strict=True)):
        right[row, : real.sum()] = ids[real]
        right_mask[row, : real.sum()] = 1

    out = replayed(other, trace, right, attention_mask=right_mask)

    for number in range(3):
        assert trace.sequence(number).agreement(out.sequence(number)).ok


def test_sequences_that_ended_early_keep_their_experts(model, other):
    """After its end a sequence of a batch is run on; what came after is no part of it."""
    with torch.no_grad(), record_routing(model) as trace:
        sequences = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    mask = torch.ones_like(sequences)
    mask[0, 10:] = 0

    out = replayed(other, trace, sequences, attention_mask=mask)

    for fqn in trace.layers:
        was, now = trace.indices[fqn].unflatten(0, (3, 12)), out.indices[fqn].unflatten(0, (3, 13))
        assert torch.equal(was[0, :10].long(), now[0, :10].long())
        assert torch.equal(was[1:].long(), now[1:, :12].long())


def test_micro_batches_take_the_sequences_in_order(model, other):
    trace = recorded(model, IDS)
    with torch.no_grad(), replay_routing(other, trace), record_routing(other) as out:
        other(IDS[:2])
        other(IDS[2:])

    assert trace.agreement(out).ok


def test_forward_that_failed_can_be_run_again(model, other):
    """A pass that does not come to its end takes nothing of the trace."""
    trace = recorded(model, IDS)

    def fail(*args):
        raise KeyboardInterrupt

    with torch.no_grad(), replay_routing(other, trace), record_routing(other) as out:
        handle = other.model.layers[1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            other(IDS)
        handle.remove()
        other(IDS)

    assert trace.agreement(out).ok


def test_packed_sequences_take_their_own_tokens(model, other):
    """Sequences in one row are told apart by positions that start at 0."""
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS[:1])
        model(IDS[1:2, :5])
    packed = torch.cat([IDS[:1], IDS[1:2, :5]], dim=1)
    positions = torch.cat([torch.arange(8), torch.arange(5)]).unsqueeze(0)

    out = replayed(other, trace, packed, position_ids=positions)

    for fqn in trace.layers:
        assert torch.equal(out.indices[fqn], trace.indices[fqn])


def test_entries_below_zero_are_routed_live(model, other):
    trace, live = recorded(model, IDS), recorded(other, IDS)
    tensors = trace.to_list()
    for tensor in tensors:
        tensor[5] = -1

    out = replayed(other, tensors, IDS)

    first = trace.layers[0]  # In later layers the token has been changed by then.
    assert torch.equal(out.indices[first][5], live.indices[first][5])
    assert torch.equal(out.indices[first][:5], trace.indices[first][:5])


def test_gradient_differs_only_in_what_the_routes_change(model):
    """With the weights of the recording, imposed routes leave loss and gradients as they are."""
    trace = recorded(model, IDS)
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with replay_routing(model, trace):
        model(IDS, labels=IDS).loss.backward()

    for name, parameter in model.named_parameters():
        if name in plain:
            assert torch.allclose(parameter.grad, plain[name], atol=1e-7), name
    model.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_replayed_bit_for_bit(dtype):
    half = tiny_model("qwen3_moe").to(dtype)
    trace = recorded(half, IDS)
    with torch.no_grad():
        plain = half(IDS).logits
        with replay_routing(half, trace):
            assert torch.equal(half(IDS).logits, plain)


def test_autocast_is_replayed_bit_for_bit(model):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(IDS).logits
        trace = recorded(model, IDS)
        with replay_routing(model, trace):
            assert torch.equal(model(IDS).logits, plain)


# --- refused --------------------------------------------------------------------------------------


def refused_before_running(model, trace, *args, match, **options):
    ran = []
    handle = model.model.layers[0].register_forward_hook(lambda *args: ran.append(1))
    with pytest.raises(RoutingError, match=match):
        replayed(model, trace, *args, **options)
    handle.remove()
    assert not ran, "the forward ran"


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((3, 7), "has 7 tokens, its trace has 8"),
        ((3, 10), "has 10 tokens, its trace has 8"),
        ((4, 8), "the trace has 3 sequences"),
    ],
)
def test_other_tokens_are_refused(model, shape, match):
    trace = recorded(model, IDS)

    refused_before_running(model, trace, torch.ones(shape, dtype=torch.int64), match=match)


def test_trace_that_is_used_up_is_refused(model):
    trace = recorded(model, IDS)
    with torch.no_grad(), replay_routing(model, trace):
        model(IDS)
        with pytest.raises(RoutingError, match="3 of which are used"):
            model(IDS)


def test_rows_without_sequences_must_be_as_many(model):
    tensors = [tensor[:-2] for tensor in recorded(model, IDS).to_list()]

    refused_before_running(model, tensors, IDS, match="needs 24 rows, or 21 without the last")


def test_cache_that_was_filled_before_is_refused(model):
    trace = recorded(model, IDS)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :4], **with_cache(model, cache))

        with replay_routing(model, trace), pytest.raises(RoutingError, match="filled the cache"):
            model(IDS[:, 4:], **with_cache(model, cache))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 2}, "the model has 2 routers, the trace 3; without a router"),
        ({"num_hidden_layers": 4}, "without a trace: model.layers.3.mlp.gate"),
        ({"num_experts_per_tok": 3}, "chooses 3 experts for each token, the trace has 2"),
        ({"num_experts": 16}, "from 16 experts, the trace was recorded on 8"),
        ({"mlp_only_layers": [1]}, "without a router: model.layers.1.mlp.gate"),
    ],
)
def test_other_configurations_are_refused(model, changes, match):
    trace = recorded(model, IDS)
    other = tiny_model("qwen3_moe", **changes)

    with pytest.raises(RoutingError, match=match), replay_routing(other, trace):
        pytest.fail("the block must not run")


def test_other_family_is_refused(model):
    trace = recorded(model, IDS)
    other = tiny_model("qwen2_moe")

    with (
        pytest.raises(RoutingError, match="'qwen3_moe' model, this one is 'qwen2_moe'"),
        replay_routing(other, trace),
    ):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("routes", [None, "routes", {"a": 1}, 3])
def test_other_values_are_refused(model, routes):
    with (
        pytest.raises(RoutingError, match="expected a RoutingTrace"),
        replay_routing(model, routes),
    ):
        pytest.fail("the block must not run")


def test_empty_trace_is_refused(model):
    with record_routing(model) as trace:
        pass

    with pytest.raises(RoutingError, match="no tokens"), replay_routing(model, trace):
        pytest.fail("the block must not run")


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([[0, 8]], "expert 8, but there are 8"),
        ([[3, 3]], "token 0 has an expert twice"),
        ([[1, 2], [0, 0]], "1 of 2 tokens have no routes, only zeros"),
        ([[1, 2, 3]], r"shape \(1, 3\), expected \(num_tokens, 2\)"),
    ],
)
def test_routes_no_router_makes_are_refused(model, rows, match):
    tensors = [torch.tensor(rows)] * 3

    with pytest.raises(RoutingError, match=match):
        RoutingTrace.from_list(model, tensors)


def test_routes_across_too_many_groups_are_refused():
    model = tiny_model("deepseek_v3")  # Two groups of four, one of them for each token.

    with pytest.raises(RoutingError, match="lie in 2 groups, the router allows 1 of 2"):
        RoutingTrace.from_list(model, [torch.tensor([[0, 4]])] * 2)
