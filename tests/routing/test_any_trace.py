"""Any trace: it is shown, kept in a file, and handed to every engine and back, or refused."""

from __future__ import annotations

import contextlib

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchlab.errors import RoutingError
from patchlab.notebook.routing_widget import RoutingWidget
from patchlab.routing import RoutingTrace
from patchlab.routing.trace import Router, Routes, TokenBlock, smallest_dtype
from tests.routing.families import tiny_model

MODEL = tiny_model("qwen3_moe")
FQNS = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]
EXPERTS, TOP_K = 8, 2


@st.composite
def blocks(draw):
    """Draw sequences that ran together, padded or not."""
    batch_size, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    real = None
    if draw(st.booleans()):
        bits = draw(st.lists(st.booleans(), min_size=batch_size * length))
        real = torch.tensor(bits[: batch_size * length]).reshape(batch_size, length)
    prompt = draw(st.none() | st.integers(0, length))
    return TokenBlock(batch_size, length, real=real, prompt=prompt)


@st.composite
def traces(draw, *, live=True):
    """Draw a trace of the toy model; padding has no experts, other tokens may have none."""
    group = tuple(draw(st.lists(blocks(), min_size=1, max_size=3)))
    rows = sum(block.num_tokens for block in group)
    real = torch.cat(
        [
            torch.ones(block.num_tokens, dtype=torch.bool)
            if block.real is None
            else block.real.flatten()
            for block in group
        ]
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    indices = {}
    for fqn in FQNS:
        index = torch.rand(rows, EXPERTS, generator=random).topk(TOP_K).indices
        index[~real] = -1
        if live and draw(st.booleans()):
            index[torch.rand(rows, generator=random) < 0.2] = -1
        indices[fqn] = index
    has_live = any(bool((index < 0).any()) for index in indices.values())
    dtype = smallest_dtype(EXPERTS, has_live=has_live)
    routers = tuple(Router(fqn, layer, EXPERTS, TOP_K, "model") for layer, fqn in enumerate(FQNS))
    small = {fqn: index.to(dtype) for fqn, index in indices.items()}
    return RoutingTrace(Routes(routers, small, {"model": group}, "qwen3_moe", 3))


def same(one, other):
    assert one.layers == other.layers
    for fqn in one.layers:
        assert torch.equal(one.indices[fqn], other.indices[fqn])
        assert one.indices[fqn].dtype is other.indices[fqn].dtype


kept = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@kept
@given(traces())
def test_any_trace_is_what_it_was_after_a_file(tmp_path, trace):
    trace.save(tmp_path / "trace.safetensors")
    loaded = RoutingTrace.load(tmp_path / "trace.safetensors")

    same(loaded, trace)
    for ours, theirs in zip(trace.blocks["model"], loaded.blocks["model"], strict=True):
        assert (ours.batch_size, ours.length) == (theirs.batch_size, theirs.length)
        assert ours.prompt == theirs.prompt
        assert (ours.real is None) == (theirs.real is None)
        assert ours.real is None or torch.equal(ours.real, theirs.real)


@settings(max_examples=60, deadline=None)
@given(traces())
def test_any_trace_is_shown_in_every_form(trace):
    for value in (trace, trace.balance(), trace.agreement(trace)):
        assert value.to_text()
        assert value.to_html()
        value.to_frame()
    assert trace.agreement(trace).ok
    widget = RoutingWidget(trace, trace)
    assert len(widget.experts) == 2 * len(FQNS) * widget.facts["tokens"] * TOP_K
    widget.close()
    assert sum(int(load.sum()) for load in trace.load_per_expert().values()) == sum(
        int((index >= 0).sum()) for index in trace.indices.values()
    )


@settings(max_examples=60, deadline=None)
@given(traces(), st.data())
def test_each_sequence_goes_to_engines_and_back(trace, data):
    number = data.draw(st.integers(0, trace.num_sequences - 1))
    one = trace.sequence(number)
    assert not any(block.real is not None for block in one.blocks["model"])

    if one.num_tokens:
        back = RoutingTrace.from_vllm(MODEL, one.to_vllm(dense=False))
        for fqn in FQNS:
            assert torch.equal(back.indices[fqn].long(), one.indices[fqn].long())
    unknown = any(bool((index < 0).any()) for index in one.indices.values())
    with contextlib.suppress(RoutingError):
        dense = RoutingTrace.from_vllm(MODEL, one.to_vllm())
        assert not unknown
        assert [index.tolist() for index in dense.to_list()] == [i.tolist() for i in one.to_list()]


@settings(max_examples=60, deadline=None)
@given(traces())
def test_whole_batches_go_to_verl_and_back(trace):
    padded = trace.to_verl()
    assert padded.shape[0] == trace.num_sequences

    back = RoutingTrace.from_verl(MODEL, padded)

    for number in range(trace.num_sequences):
        rows = back.sequence(number).to_list()
        for place, fqn in enumerate(FQNS):
            known = rows[place][(rows[place] >= 0).all(dim=-1)]
            own = trace.sequence(number).indices[fqn].long()
            assert torch.equal(known, own[(own >= 0).all(dim=-1)])
