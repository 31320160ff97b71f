"""Statistics: load, balance and agreement, and how they show themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchlab.errors import RoutingError
from patchlab.routing import RoutingTrace, record_routing
from patchlab.routing.statistics import LayerBalance, expert_load
from tests.routing.families import tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
MODEL = tiny_model("qwen3_moe")


def recorded(model=MODEL, ids=IDS):
    with torch.no_grad(), record_routing(model) as trace:
        model(ids)
    return trace


loads = st.lists(st.integers(0, 50), min_size=2, max_size=16).filter(any)


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=20))
def test_load_counts_every_known_slot_once(pairs):
    index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)

    load = expert_load(index, 6)

    flat = [expert for pair in pairs for expert in pair]
    assert load.tolist() == [flat.count(expert) for expert in range(6)]


def test_expert_beyond_the_layer_is_refused():
    with pytest.raises(RoutingError, match="expert 6 in a layer of 6"):
        expert_load(torch.tensor([[1, 6]]), 6)


@given(loads)
def test_balance_figures_keep_their_bounds(load):
    """Even is 1, 1, 0; one expert for all is the number of experts, 0, and all others unused."""
    one = LayerBalance("gate", 0, tuple(load))

    assert 1 - 1e-9 <= one.busiest <= len(load) + 1e-9
    assert 0 <= one.entropy <= 1 + 1e-9
    assert one.variation >= 0
    assert one.dropped(len(load)) == 0
    assert 0 <= one.dropped(1.0) < 1
    assert len(one.dead) == load.count(0)


def test_balance_of_the_extremes():
    even, single = LayerBalance("a", 0, (3, 3, 3)), LayerBalance("b", 1, (0, 9, 0))

    assert (even.busiest, even.entropy, even.variation) == (1.0, pytest.approx(1.0), 0.0)
    assert (single.busiest, single.entropy, single.dead) == (3.0, 0.0, (0, 2))
    assert single.dropped(1.0) == pytest.approx(2 / 3)
    assert LayerBalance("c", 2, (0, 0)).busiest == 0.0


def test_entropy_is_that_of_the_shares():
    one = LayerBalance("gate", 0, (1, 3))

    assert one.entropy == pytest.approx(-(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75)))


def test_agreement_of_a_trace_with_itself_is_whole():
    agreement = recorded().agreement(recorded())

    assert agreement.ok
    assert (agreement.same_sets, agreement.overlap, agreement.same_tokens) == (1.0, 1.0, 1.0)
    assert agreement.by_token == (0,) * 16


def test_agreement_counts_what_was_changed():
    """One slot of two tokens in one layer: two pairs differ, half of their slots."""
    trace = recorded()
    tensors = trace.to_list()
    for row in (3, 9):
        others = set(range(8)) - set(tensors[1][row].tolist())
        tensors[1][row, 0] = min(others)
    tensors[2] = tensors[2].flip(-1)  # The order within a row is no difference.

    agreement = trace.agreement(RoutingTrace.from_list(MODEL, tensors))

    assert [one.same_sets for one in agreement.layers] == [16, 14, 16]
    assert agreement.layers[1].overlap == pytest.approx(30 / 32)
    assert agreement.same_tokens == pytest.approx(14 / 16)
    assert [place for place, number in enumerate(agreement.by_token) if number] == [3, 9]
    assert not agreement.ok


def test_traces_of_other_tokens_or_routers_are_not_compared():
    with pytest.raises(RoutingError, match="has 8 tokens in one trace and 5 in the other"):
        recorded().agreement(recorded(ids=IDS[:, :5]))
    with pytest.raises(RoutingError, match="other routers"):
        recorded().agreement(recorded(tiny_model("qwen3_moe", num_hidden_layers=2)))


def test_rollout_is_compared_with_a_step_that_is_one_token_longer():
    with torch.no_grad(), record_routing(MODEL) as rollout:
        sequences = MODEL.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    agreement = rollout.agreement(recorded(ids=sequences))

    assert sequences.shape == (2, 12)
    assert sum(one.tokens for one in agreement.layers) == 3 * 2 * 11
    assert agreement.ok


def test_unknown_slots_are_not_compared():
    tensors = recorded().to_list()
    for tensor in tensors:
        tensor[:4] = -1

    agreement = recorded().agreement(RoutingTrace.from_list(MODEL, tensors))

    assert {one.tokens for one in agreement.layers} == {12}
    assert agreement.by_token[:4] == (-1,) * 4


# --- shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["trace", "balance", "agreement"])
def test_values_show_themselves(what):
    trace = recorded()
    value = {
        "trace": trace,
        "balance": trace.balance(),
        "agreement": trace.agreement(recorded(tiny_model("qwen3_moe", seed=9))),
    }[what]

    bundle = value._repr_mimebundle_()

    assert "model.layers.2.mlp.gate" in bundle["text/plain"]
    assert "model.layers.2.mlp.gate" in bundle["text/html"]
    assert value.to_text() == value.to_text()
    assert "0x" not in repr(value) + bundle["text/plain"]


def test_trace_says_what_it_is_of():
    text = recorded().to_text()

    assert text.startswith(
        "qwen3_moe: 16 tokens in 2 sequences · 3 routers · 2 of 8 experts · 6 bytes per token"
    )


def test_frames_hold_numbers():
    trace = recorded()
    frame = trace.to_frame()

    assert list(frame.columns) == ["token", "layer", "router", "expert_0", "expert_1"]
    assert len(frame) == 3 * 16
    layer = frame[frame.layer == 1]
    assert layer[["expert_0", "expert_1"]].to_numpy().tolist() == trace.to_list()[1].tolist()
    balance = trace.balance().to_frame()
    assert balance.slots.tolist() == [32, 32, 32]
    assert trace.agreement(trace).to_frame().same_sets.tolist() == [16, 16, 16]


def test_names_with_markup_are_text():
    trace = recorded()
    text = LayerBalance("<script>alert(1)</script>", 0, (1, 2))
    balance = type(trace.balance())((text,))

    assert "<script>" not in balance.to_html()


def test_plot_leaves_the_state_of_matplotlib_alone(tmp_path):
    """No figure is kept, and a title is text."""
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    figure = recorded().plot(title="a $ and a $")
    figure.savefig(tmp_path / "load.png")

    assert (tmp_path / "load.png").stat().st_size > 1000
    assert figure.axes[0].get_title(loc="left") == "a $ and a $"
    assert pyplot.get_fignums() == before
