"""Whatever is handed in where a model, a trace or an engine's array belongs is refused by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from patchlab.errors import PatchlabError, RoutingError, TargetError
from patchlab.notebook.routing_widget import RoutingWidget
from patchlab.routing import RoutingTrace, find_routers, record_routing, replay_routing
from tests.routing.families import tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
MODEL = tiny_model("qwen3_moe")


def recorded():
    with torch.no_grad(), record_routing(MODEL) as trace:
        MODEL(IDS)
    return trace


@pytest.mark.parametrize("model", [None, 3, "model", nn.Linear, type(MODEL)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TargetError, match="must be a torch"), record_routing(model):
        pytest.fail("the block must not run")
    with pytest.raises(TargetError, match="must be a torch"), replay_routing(model, recorded()):
        pytest.fail("the block must not run")
    with pytest.raises(TargetError, match="must be a torch"):
        find_routers(model)


READERS = [
    RoutingTrace.from_list,
    RoutingTrace.from_vllm,
    RoutingTrace.from_sglang,
    RoutingTrace.from_verl,
]
ODD = [None, 3, "x", b"xx", {}, [], [None], [3], ..., float("nan")]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_is_no_array_is_refused(read, value):
    with pytest.raises(RoutingError):
        read(MODEL, value)


DTYPES = ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "?", "f4", "c8", "U3", "O", "M8[s]"]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_arrays_are_read_or_refused_whatever_their_shape_and_type(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=5)))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    integers = dtype.kind in "iu"
    array = data.draw(arrays.arrays(dtype, shape)) if integers else np.zeros(shape, dtype)
    read = data.draw(st.sampled_from(READERS))
    try:
        trace = read(MODEL, [array] * 3 if read == RoutingTrace.from_list else array)
    except PatchlabError:
        return
    for index in trace.indices.values():
        assert index.shape[1] == 2
        assert bool((index < 8).all())


@pytest.mark.parametrize("value", [2**32, -(2**40), 2**63 - 1])
def test_large_numbers_do_not_become_small_experts(value):
    """2³² as a 32-bit integer would be expert 0."""
    array = np.full((16, 3, 2), [1, 2])
    array[3, 1, 0] = value

    with pytest.raises(RoutingError, match="which is no expert"):
        RoutingTrace.from_vllm(MODEL, array)
    with pytest.raises(RoutingError, match="which is no expert"):
        RoutingTrace.from_vllm(MODEL, torch.from_numpy(array))


@pytest.mark.parametrize("value", [None, 3, MODEL, []], ids=lambda value: type(value).__name__)
def test_what_is_no_trace_is_neither_compared_nor_shown(value):
    with pytest.raises(RoutingError, match="a trace agrees with another one"):
        recorded().agreement(value)
    with pytest.raises(RoutingError, match="shows a RoutingTrace"):
        RoutingWidget(value)


@pytest.mark.parametrize("kind", [str, Path])
def test_path_in_place_of_a_trace_is_told_how_to_be_read(kind, tmp_path):
    path = tmp_path / "routes.safetensors"
    recorded().save(path)
    with (
        pytest.raises(RoutingError, match=r"RoutingTrace\.load\('.*routes\.safetensors'\)"),
        replay_routing(MODEL, kind(path)),
    ):
        pass
    with replay_routing(MODEL, RoutingTrace.load(kind(path))), torch.no_grad():
        MODEL(IDS)


@pytest.mark.parametrize("ids", ["text", ..., [[1], [2, 3]]], ids=repr)
def test_token_ids_that_are_none_are_refused(ids):
    with pytest.raises(RoutingError, match="token_ids are numbers"):
        RoutingWidget(recorded(), token_ids=ids)


def test_trace_without_tokens_shows_itself_and_says_that_it_has_none():
    with record_routing(MODEL) as trace:
        pass

    assert "0 tokens" in trace.to_text()
    assert RoutingWidget(trace).facts["tokens"] == 0
    for use in (trace.to_vllm, trace.to_verl, trace.to_sglang):
        with pytest.raises(RoutingError, match=r"no sequences|0 sequences"):
            use()
    with pytest.raises(RoutingError, match="has no tokens"):
        trace.agreement(recorded())


def test_trace_is_not_written_where_there_is_no_folder(tmp_path):
    with pytest.raises(RoutingError, match="cannot be written"):
        recorded().save(tmp_path / "none" / "trace.safetensors")


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_routes_without_values_that_can_be_read_are_refused(kind):
    routes = recorded().to_list()
    odd = [tensor.to("meta") if kind == "meta" else tensor.to_sparse() for tensor in routes]
    with pytest.raises(RoutingError, match=f"tensor 0 is a tensor of the kind .*{kind}"):
        RoutingTrace.from_list(MODEL, odd)
