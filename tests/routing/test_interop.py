"""Interop: what other engines hand over, and what they would take back."""

import base64

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchlab.errors import RoutingError
from patchlab.routing import RoutingTrace, record_routing, replay_routing
from tests.routing.families import tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
MODEL = tiny_model("deepseek_v3")  # Three layers, the first of them dense; 8 experts, 2 for each.


@pytest.fixture(scope="module")
def trace():
    return recorded(MODEL, IDS[:1])


def recorded(model, ids):
    with torch.no_grad(), record_routing(model) as trace:
        model(ids)
    return trace


def replayed(routes, ids=IDS[:1]):
    with torch.no_grad(), replay_routing(MODEL, routes), record_routing(MODEL) as trace:
        MODEL(ids)
    return trace


@st.composite
def arrays(draw):
    count = draw(st.integers(1, 5))
    array = np.zeros((count, 3, 2), dtype=np.int64)
    for layer in (1, 2):
        for token in range(count):
            group, pair = draw(st.integers(0, 1)), draw(st.permutations(range(4)))[:2]
            array[token, layer] = [expert + 4 * group for expert in pair]
    return array


@settings(deadline=None)
@given(arrays(), st.sampled_from(["uint8", "uint16", "int16", "int32", "int64"]), st.booleans())
def test_vllm_arrays_come_back_as_they_were(array, dtype, dense):
    """Of any integer type, with or without the dense layers."""
    given_array = (array if dense else array[:, 1:]).astype(dtype)

    trace = RoutingTrace.from_vllm(MODEL, given_array)

    assert trace.layers == ("model.layers.1.mlp.gate", "model.layers.2.mlp.gate")
    assert np.array_equal(trace.to_vllm(dense=True), array)
    assert np.array_equal(trace.to_vllm(dense=False), array[:, 1:])
    assert trace.to_vllm(dense=True).dtype == np.uint8
    assert trace.to_vllm(dense=False).dtype == np.int16
    assert {index.dtype for index in trace.indices.values()} == {torch.uint8}


@settings(deadline=None)
@given(arrays())
def test_lists_sglang_and_verl_come_back_as_they_were(array):
    trace = RoutingTrace.from_vllm(MODEL, array)

    for again in (
        RoutingTrace.from_list(MODEL, trace.to_list()),
        RoutingTrace.from_verl(MODEL, trace.to_verl()),
    ):
        assert np.array_equal(again.to_vllm(), array)
    assert np.array_equal(np.frombuffer(base64.b64decode(trace.to_sglang()), "<i4"), array.ravel())


def test_sglang_text_is_read():
    array = np.zeros((4, 3, 2), dtype="<i4")
    array[:, 1:] = [[[5, 4], [1, 2]]] * 4
    text = base64.b64encode(array.tobytes()).decode()

    assert np.array_equal(RoutingTrace.from_sglang(MODEL, text).to_vllm(), array)
    routed = base64.b64encode(array[:1, 1:].tobytes()).decode()
    assert np.array_equal(RoutingTrace.from_sglang(MODEL, routed).to_vllm(), array[:1])


@pytest.mark.parametrize("text", ["?", "AAAA", base64.b64encode(bytes(8)).decode()])
def test_other_text_is_refused(text):
    with pytest.raises(RoutingError, match=r"base64|integers fit neither"):
        RoutingTrace.from_sglang(MODEL, text)


@pytest.mark.parametrize("missing", [0, 1])
def test_array_of_a_rollout_is_replayed_as_it_is(trace, missing):
    """All tokens, or all but the last, as engines return them."""
    array = trace.to_vllm()[: 8 - missing]
    other = tiny_model("deepseek_v3", seed=9)
    with torch.no_grad(), replay_routing(other, array), record_routing(other) as imposed:
        other(IDS[:1])

    assert imposed.agreement(RoutingTrace.from_vllm(other, array)).ok


def test_prompt_and_completion_are_joined(trace):
    array = trace.to_vllm(dense=False)
    joined = RoutingTrace.from_vllm(MODEL, array[5:], prompt=array[:5])

    assert np.array_equal(joined.to_vllm(dense=False), array)


def test_cached_positions_are_routed_live(trace):
    array = trace.to_vllm(dense=False)
    array[:3] = -1

    partial = RoutingTrace.from_vllm(MODEL, array)

    assert np.array_equal(partial.to_vllm(dense=False), array)
    assert replayed(partial).agreement(trace).ok
    with pytest.raises(RoutingError, match="dense=False"):
        partial.to_vllm(dense=True)


def test_requests_of_a_batch_are_sequences():
    both = recorded(MODEL, IDS)
    arrays = [both.sequence(number).to_vllm() for number in range(2)]
    arrays[1] = arrays[1][:5]
    mask = torch.ones_like(IDS)
    mask[1, 5:] = 0

    trace = RoutingTrace.from_vllm(MODEL, arrays)

    assert [block.length for block in trace.blocks["model"]] == [8, 5]
    with torch.no_grad(), replay_routing(MODEL, trace), record_routing(MODEL) as imposed:
        MODEL(IDS, attention_mask=mask)
    assert imposed.sequence(1).agreement(trace.sequence(1)).ok
    with pytest.raises(RoutingError, match="2 sequences"):
        trace.to_vllm()


def test_verl_batch_keeps_its_padding():
    both = recorded(MODEL, IDS)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    batch = both.to_verl()
    batch[0, :3] = 77  # Whatever stands on padding is not looked at.

    trace = RoutingTrace.from_verl(MODEL, batch, mask)

    assert batch.shape == (2, 8, 2, 2)
    assert batch.dtype is torch.int16
    assert trace.sequence(0).num_tokens == 5
    assert bool((trace.to_verl()[0, :3] == -1).all())


def test_wide_types_are_taken_where_experts_are_many():
    model = tiny_model("qwen3_moe", num_experts=300)
    trace = recorded(model, IDS[:1])

    assert {index.dtype for index in trace.indices.values()} == {torch.int16}
    assert trace.to_vllm().dtype == np.uint16
    assert RoutingTrace.from_vllm(model, trace.to_vllm()).agreement(trace).ok


def test_uint8_experts_are_no_mask():
    """As an index torch would take uint8 for a mask; everything is widened before it is used."""
    trace = recorded(MODEL, IDS[:1])
    tensors = [tensor.to(torch.uint8) for tensor in trace.to_list()]

    assert replayed(tensors).agreement(trace).ok


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((4, 5, 2), dtype=np.int32), r"expected \(num_tokens, 3 or 2, 2\)"),
        (np.zeros((4, 3, 4), dtype=np.int32), r"expected \(num_tokens, 3 or 2, 2\)"),
        (np.zeros((4, 6), dtype=np.int32), r"expected \(num_tokens, 3 or 2, 2\)"),
        (np.zeros((4, 3, 2), dtype=np.float32), "expected integers"),
        (np.zeros((4, 3, 2), dtype=np.int32), "4 of 4 tokens have no routes, only zeros"),
        (np.full((4, 3, 2), 9), "expert 9, but there are 8"),
        ([[1, 2]], "is a list"),
    ],
)
def test_wrong_arrays_are_refused(array, match):
    with pytest.raises(RoutingError, match=match):
        RoutingTrace.from_vllm(MODEL, array)


def test_wrong_lists_are_refused(trace):
    tensors = trace.to_list()

    with pytest.raises(RoutingError, match="1 tensors for 2 routers"):
        RoutingTrace.from_list(MODEL, tensors[:1])
    with pytest.raises(RoutingError, match="all of them see the same tokens"):
        RoutingTrace.from_list(MODEL, [tensors[0], tensors[1][:3]])


def test_layers_with_two_routers_are_no_array():
    model = tiny_model("jetmoe")
    trace = recorded(model, IDS[:1])

    with pytest.raises(RoutingError, match="several routers"):
        trace.to_vllm()
    with pytest.raises(RoutingError, match="several routers"):
        RoutingTrace.from_vllm(model, np.zeros((8, 6, 2), dtype=np.int32))
    assert RoutingTrace.from_list(model, trace.to_list()).agreement(trace).ok
