"""Left over: routes of a trace that no forward took are told of when the replay ends."""

import contextvars
import re
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from patchlab.errors import PatchlabWarning, RoutingError
from patchlab.routing import RoutingTrace, attach, find_routers, record_routing, replay_routing
from tests.routing.families import tiny_model, with_cache

IDS = torch.randint(3, 100, (3, 8), generator=torch.Generator().manual_seed(1))
MODEL = tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def trace():
    with torch.no_grad(), record_routing(MODEL) as trace:
        MODEL(IDS)
    return trace


def run(trace, *batches, strict=False):
    with torch.no_grad(), replay_routing(MODEL, trace, strict=strict):
        for ids in batches:
            MODEL(ids)


def run_in_steps(trace, *ends, strict=False):
    cache = DynamicCache(config=MODEL.config)
    with torch.no_grad(), replay_routing(MODEL, trace, strict=strict):
        start = 0
        for end in ends:
            MODEL(IDS[:, start:end], **with_cache(MODEL, cache))
            start = end


@contextmanager
def warned(match, trace, model=MODEL):
    """Replay a trace in a block, and expect one warning when it ends."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.no_grad(), replay_routing(model, trace):
            yield
    assert [one.category for one in told] == [PatchlabWarning]
    assert re.search(match, str(told[0].message))


@pytest.mark.parametrize("sizes", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_trace_that_is_used_up_says_nothing(trace, sizes):
    """Warnings are errors here; a strict replay raises nothing either."""
    run(trace, *IDS.split(sizes))
    run(trace, *IDS.split(sizes), strict=True)


@pytest.mark.parametrize("ends", [(8,), (3, 8), (3, 4, 5, 6, 7, 8)])
def test_trace_that_is_used_up_in_steps_says_nothing(trace, ends):
    run_in_steps(trace, *ends)
    run_in_steps(trace, *ends, strict=True)


@pytest.mark.parametrize(("used", "left"), [(1, 2), (2, 1)])
def test_sequences_that_no_forward_took_are_counted(trace, used, left):
    with pytest.warns(PatchlabWarning, match=rf"not used: {left} of 3 sequences\. ") as seen:
        run(trace, IDS[:used])
    assert len(seen) == 1
    with pytest.raises(RoutingError, match=rf"not used: {left} of 3 sequences\. "):
        run(trace, IDS[:used], strict=True)


@pytest.mark.parametrize(("ends", "at"), [((4,), 4), ((4, 5, 6), 6)])
def test_sequences_that_stopped_early_are_named(trace, ends, at):
    with pytest.warns(PatchlabWarning, match=rf"sequence 0 after token {at} of 8, sequence 1"):
        run_in_steps(trace, *ends)


def test_sequence_that_stopped_early_is_told_of_though_others_followed():
    with torch.no_grad(), record_routing(MODEL) as trace:
        MODEL(IDS[:1])
        MODEL(IDS[1:])
    with warned(r"not used: sequence 0 after token 5 of 8\. ", trace):
        MODEL(IDS[:1, :5], **with_cache(MODEL, DynamicCache(config=MODEL.config)))
        MODEL(IDS[1:])


def test_generation_that_went_on_to_its_end_says_nothing():
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), record_routing(MODEL) as trace:
        sequences = MODEL.generate(IDS, **options)
    with torch.no_grad(), replay_routing(MODEL, trace, strict=True):
        MODEL.generate(IDS, **options)
    mask = torch.ones_like(sequences)
    mask[:2, 9:] = 0  # Two of the batch ended early; what came after is no part of them.
    with torch.no_grad(), replay_routing(MODEL, trace):
        MODEL(sequences, attention_mask=mask)
    with warned("after token 9 of 11", trace):
        MODEL.generate(IDS, max_new_tokens=2, min_new_tokens=2, do_sample=False)


@pytest.fixture(scope="module")
def generated():
    """Three sequences of 8 + 3 tokens that were generated together, and their trace."""
    with torch.no_grad(), record_routing(MODEL) as trace:
        sequences = MODEL.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return sequences, trace


@pytest.mark.parametrize("length", [1, 5, 10])
@pytest.mark.parametrize("use_cache", [False, True])
def test_generation_of_which_no_sequence_was_run_to_its_end_is_told_of(
    generated, length, use_cache
):
    sequences, trace = generated
    with warned(rf"not used: sequence 0 after token {length} of 11, sequence 1 after", trace):
        MODEL(sequences[:, :length], use_cache=use_cache)
    refused = pytest.raises(RoutingError, match=rf"sequence 2 after token {length} of 11\. ")
    with refused, torch.no_grad(), replay_routing(MODEL, trace, strict=True):
        MODEL(sequences[:, :length], use_cache=use_cache)


def test_padding_of_a_generation_does_not_count_as_run(generated):
    sequences, trace = generated
    mask = torch.ones_like(sequences)
    mask[:, 9:] = 0
    with warned("after token 9 of 11", trace):
        MODEL(sequences, attention_mask=mask)


def test_sequence_that_stops_within_its_prompt_is_told_of_though_others_went_on(generated):
    sequences, trace = generated
    with warned(r"not used: sequence 1 after token 5 of 11\. ", trace):
        MODEL(sequences[:1, :11])
        MODEL(sequences[1:2, :5])
        MODEL(sequences[2:, :9])


@pytest.mark.parametrize("order", [(11, 9, 8), (9, 11, 11), (8, 8, 11), (12, 12, 12)])
@pytest.mark.parametrize("packed", [False, True])
def test_generation_of_which_one_sequence_went_to_its_end_says_nothing(generated, order, packed):
    """Guards against false alarms: shorter ones may have ended before, in whatever forward."""
    sequences, trace = generated
    parts = [row[:length] for row, length in zip(sequences, order, strict=True)]
    with torch.no_grad(), replay_routing(MODEL, trace):
        if packed:
            positions = torch.cat([torch.arange(len(part)) for part in parts])
            MODEL(torch.cat(parts)[None], position_ids=positions[None])
        else:
            for part in parts:
                MODEL(part[None])


def test_prefixes_that_are_run_anew_say_nothing_where_they_were_recorded_so():
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": False}
    with torch.no_grad(), record_routing(MODEL) as trace:
        MODEL.generate(IDS, **options)
    with torch.no_grad(), replay_routing(MODEL, trace, strict=True):
        MODEL.generate(IDS, **options)


def test_routes_of_what_is_padding_now_are_not_left_over(trace):
    """The trace was recorded without a mask."""
    mask = torch.ones_like(IDS)
    mask[:, 6:] = 0
    with torch.no_grad(), replay_routing(MODEL, trace, strict=True):
        MODEL(IDS, attention_mask=mask)


def test_rows_without_sequences_are_used_up_by_one_batch(trace):
    run(trace.to_list(), IDS, strict=True)
    with warned(r"not used: sequence 0 after token 6 of 24\. ", trace.to_list()):
        MODEL(IDS[:1, :6], **with_cache(MODEL, DynamicCache(config=MODEL.config)))


def test_block_in_which_the_model_did_not_run_says_so(trace):
    """As when another model is called, of which the trace is as well."""
    other = tiny_model("qwen3_moe", seed=4)
    with warned("no forward of the model ran in the block", trace):
        other(IDS)


def test_thread_without_the_scope_is_named_as_the_reason(trace):
    with warned("in another thread than the block", trace):
        thread = threading.Thread(target=MODEL, args=(IDS,))
        thread.start()
        thread.join()

    with replay_routing(MODEL, trace, strict=True):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(MODEL, IDS))
        thread.start()
        thread.join()


def replicated(model):
    """The model as `DataParallel` copies it for one device: modules of the same classes."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in copies.items():
        copied._modules = {name: copies.get(child) for name, child in module._modules.items()}
        copied._parameters = dict(module._parameters)
    return copies[model]


def test_replicas_in_threads_are_missed_and_said_so(trace):
    """What `DataParallel` runs on several devices is no module of the model that was handed in."""

    def run_replica():
        thread = threading.Thread(target=replicated(MODEL), args=(IDS,))
        thread.start()
        thread.join()

    with warned("DataParallel", trace):
        run_replica()
    with pytest.warns(PatchlabWarning, match="DataParallel"), record_routing(MODEL) as recorded:
        run_replica()
    assert recorded.num_tokens == 0


def test_router_that_never_ran_is_named(trace):
    """As when a layer is skipped in the replay and was not in the recording."""
    layer = MODEL.model.layers[1]
    own, layer.mlp = layer.mlp, torch.nn.Identity()
    try:
        MODEL(IDS)  # Whether it can run so at all.
        layer.mlp, skipped = own, torch.nn.Identity()
        with warned(r"all routes of model\.layers\.1\.mlp\.gate", trace):
            layer.mlp = skipped
            MODEL(IDS)
    finally:
        layer.mlp = own


def test_forward_without_any_router_is_refused(trace):
    own = [layer.mlp for layer in MODEL.model.layers]
    refused = pytest.raises(RoutingError, match="none of the routers of Qwen3MoeModel ran")
    try:
        with torch.no_grad(), replay_routing(MODEL, trace), refused:
            for layer in MODEL.model.layers:
                layer.mlp = torch.nn.Identity()
            MODEL(IDS)
    finally:
        for layer, mlp in zip(MODEL.model.layers, own, strict=True):
            layer.mlp = mlp


def test_router_with_tokens_of_its_own_counts_its_calls():
    model = tiny_model("ernie4_5_vl_moe_text")
    ids = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(1))
    kinds = torch.tensor([[0, 1, 0, 1, 0, 0]])
    with torch.no_grad(), record_routing(model) as trace:
        model(ids, moe_mm_token_type_ids=kinds)
        model(ids, moe_mm_token_type_ids=kinds)
    own = [router.fqn for router in trace.routers if router.tokens == router.fqn]
    assert own

    with warned(rf"1 of 2 calls of {own[0]}", trace, model):
        model(ids, moe_mm_token_type_ids=kinds)
    with torch.no_grad(), replay_routing(model, trace, strict=True):
        model(ids, moe_mm_token_type_ids=kinds)
        model(ids, moe_mm_token_type_ids=kinds)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, StopIteration])
@pytest.mark.parametrize("strict", [False, True])
def test_error_that_is_under_way_is_the_one_that_arrives(trace, error, strict):
    """Nothing is raised, and nothing warned of, over an error that ends the block."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(error) as seen, replay_routing(MODEL, trace, strict=strict):
            raise error("the user's own")
    assert not told
    assert seen.value.__context__ is None


@pytest.mark.parametrize("strict", [False, True])
def test_refused_forward_is_told_of_once(trace, strict):
    """Who catches the refusal in the block has been told; what is left then is no news."""
    with replay_routing(MODEL, trace, strict=strict), pytest.raises(RoutingError):
        MODEL(IDS[:, :3])


def test_forward_that_failed_and_was_run_again_is_no_failure(trace):
    def fail(*args):
        raise ValueError("failed")

    with warned("1 of 3 sequences", trace):
        handle = MODEL.model.layers[1].register_forward_hook(fail)
        with pytest.raises(ValueError, match="failed"):
            MODEL(IDS[:2])
        handle.remove()
        MODEL(IDS[:2])


def test_refusal_at_the_end_leaves_the_model_as_it_was(trace):
    before = [type(module) for module in MODEL.modules()]
    with pytest.raises(RoutingError, match="2 of 3"):
        run(trace, IDS[:1], strict=True)

    assert [type(module) for module in MODEL.modules()] == before
    assert attach._HELD == {}
    with torch.no_grad():
        MODEL(IDS)


def test_warning_points_at_the_block(trace):
    with pytest.warns(PatchlabWarning) as seen, replay_routing(MODEL, trace):
        MODEL(IDS[:1])
    assert seen[0].filename == __file__


def test_part_of_a_trace_is_used_up_by_its_part(trace):
    """The way out that the message names is one."""
    for number in range(3):
        run(trace.sequence(number), IDS[number : number + 1], strict=True)


def test_routes_of_engines_are_counted_as_well(trace):
    arrays = [trace.sequence(number).to_vllm() for number in range(3)]
    assert len(find_routers(MODEL)) == 3
    with pytest.warns(PatchlabWarning, match="2 of 3 sequences"):
        run(RoutingTrace.from_vllm(MODEL, arrays), IDS[:1])


def test_replay_inside_of_a_replay_decides_and_both_are_used_up(trace):
    """The outer one stands back, and its trace goes on with each forward all the same."""
    opposite = [(index + 4) % 8 for index in trace.to_list()]
    with (
        torch.no_grad(),
        replay_routing(MODEL, trace, strict=True),
        record_routing(MODEL) as outer,
        replay_routing(MODEL, opposite, strict=True),
        record_routing(MODEL) as inner,
    ):
        MODEL(IDS)
    assert inner.agreement(RoutingTrace.from_list(MODEL, opposite)).ok
    assert outer.agreement(inner).ok

    with torch.no_grad(), replay_routing(MODEL, trace, strict=True):
        with replay_routing(MODEL, trace.sequence(0), strict=True):
            MODEL(IDS[:1])
        with record_routing(MODEL) as rest:
            MODEL(IDS[1:])
    assert trace.sequence(2).agreement(rest.sequence(1)).ok
