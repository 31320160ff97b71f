"""Scopes: each its own, in any order, in any thread; and afterwards nothing is left of any."""

import asyncio
import contextvars
import copy
import gc
import io
import linecache
import pickle
import sys
import threading
import weakref

import pytest
import torch

from patchlab.errors import PatchlabWarning
from patchlab.routing import attach, record_routing, replay_routing, watch
from tests.routing.families import enable_checkpointing, tiny_model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    return tiny_model("qwen3_moe")


def state(model):
    """Everything of a model that a scope may change."""
    return [
        (
            name,
            type(module),
            sorted(vars(module)),
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            dict(module._forward_pre_hooks_with_kwargs),
            vars(module).get("_gradient_checkpointing_func"),
        )
        for name, module in model.named_modules()
    ]


@pytest.fixture(autouse=True)
def nothing_is_held():
    yield
    assert attach._HELD == {}
    assert watch.watchers() == ()


def recorded(model, ids=IDS):
    with torch.no_grad(), record_routing(model) as trace:
        model(ids)
    return trace


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_exit_restores_the_model(model, error):
    before = state(model)
    trace = recorded(model)
    with pytest.raises(error), record_routing(model), replay_routing(model, trace):
        model(IDS)
        raise error

    assert state(model) == before
    with torch.no_grad():
        model(IDS)


def test_scopes_may_end_in_any_order(model):
    before = state(model)
    first, second = record_routing(model), record_routing(model.model)
    one, two = first.__enter__(), second.__enter__()
    model(IDS)
    first.__exit__(None, None, None)
    model(IDS)
    second.__exit__(None, None, None)

    assert one.num_tokens == 16
    assert two.num_tokens == 32
    assert state(model) == before


def interrupted_at(step, run):
    """Run something and raise KeyboardInterrupt at the given line of the routing room."""
    lines = 0

    def tracer(frame, event, arg):
        nonlocal lines
        if "patchlab/routing" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # Not on the way out of a `with`, where a tracer can cut in before `__exit__` is called and
        # a signal cannot.
        if event == "line" and not line.startswith("with "):
            lines += 1
            if lines == step:
                sys.settrace(None)
                raise KeyboardInterrupt
        return tracer

    sys.settrace(tracer)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_interrupt_at_any_line_restores_the_model(model):
    """Entering, running and leaving, interrupted at each line in turn, leaves the model alone."""
    trace = recorded(model)
    enable_checkpointing(model).eval()
    before = state(model)

    def run():
        with torch.no_grad(), replay_routing(model, trace), record_routing(model):
            model(IDS)

    step, stride = 1, 1
    while interrupted_at(step, run):
        assert state(model) == before, f"line {step}"
        assert attach._HELD == {}, f"line {step}"
        assert watch.watchers() == (), f"line {step}"
        # Every line at the start, where entering is; then ever fewer, to cover the whole run.
        step += stride
        stride = max(1, step // 60)
    assert torch.is_grad_enabled()
    assert step > 300, "the run is too short to have been interrupted everywhere"
    run()
    assert state(model) == before


def test_each_thread_has_its_own_trace(model):
    """Two threads on one model: each records, or replays, what it runs itself."""
    batches = [IDS, IDS.flip(1), IDS[:, :5], IDS[:1]]
    expected = [recorded(model, batch) for batch in batches]
    traces, errors = {}, []
    barrier = threading.Barrier(len(batches))

    def work(number):
        try:
            barrier.wait()
            for _ in range(5):
                with torch.no_grad(), record_routing(model) as trace:
                    model(batches[number])
                traces[number] = trace
                assert trace.agreement(expected[number]).ok
                with torch.no_grad(), replay_routing(model, trace):
                    model(batches[number])
        except BaseException as error:  # noqa: BLE001 - reported below, in the test's own thread
            errors.append(error)

    before = state(model)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert state(model) == before


def recorded_in_a_thread(model):
    with record_routing(model) as trace:
        thread = threading.Thread(target=model, args=(IDS,))
        thread.start()
        thread.join()
    return trace


def test_thread_without_a_scope_is_not_recorded_and_said_so(model):
    """A thread does not inherit the block; a trace that is empty for that is not left unsaid."""
    with pytest.warns(PatchlabWarning, match="another thread"):
        assert recorded_in_a_thread(model).num_tokens == 0

    with record_routing(model) as trace:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(model, IDS))
        thread.start()
        thread.join()
    assert trace.num_tokens == 16


def test_tasks_have_their_own_traces(model):
    async def work(ids):
        # Not under `no_grad`, which is the thread's and not the task's.
        with record_routing(model) as trace:
            await asyncio.sleep(0)
            model(ids)
            await asyncio.sleep(0)
        return trace

    async def both():
        return await asyncio.gather(work(IDS), work(IDS[:, :3]))

    one, two = asyncio.run(both())

    assert (one.num_tokens, two.num_tokens) == (16, 6)


def test_context_that_outlives_the_scope_finds_it_closed(model):
    """A context copied inside the block does not record into a trace that is complete."""
    with record_routing(model) as trace:
        model(IDS)
        context = contextvars.copy_context()
        with record_routing(model):
            inner = contextvars.copy_context()
    context.run(model, IDS)
    inner.run(model, IDS)

    assert trace.num_tokens == 16


def test_models_may_be_recorded_at_once(model):
    other = tiny_model("deepseek_v3")
    with torch.no_grad(), record_routing(model) as one, record_routing(other) as two:
        model(IDS)
        other(IDS)

    assert one.agreement(recorded(model)).ok
    assert two.agreement(recorded(other)).ok


def test_copies_and_pickles_are_of_the_original_classes(model):
    """After the block and inside it; the copy runs, and knows nothing of the scope."""
    classes = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    with record_routing(model) as trace:
        model(IDS)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert list(model.state_dict()) == keys
    copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))

    for other in copies:
        assert [type(module) for module in other.modules()] == classes
        with torch.no_grad(), record_routing(other) as again:
            assert torch.equal(other(IDS).logits, model(IDS).logits)
        assert again.agreement(trace).ok
        assert other.generate(IDS, max_new_tokens=2, num_beams=2).shape == (2, 10)
    assert trace.num_tokens == 16


def test_copy_of_a_checkpointed_model_has_its_own_function(model):
    enable_checkpointing(model)
    own = model.model.layers[0]._gradient_checkpointing_func
    with record_routing(model):
        assert model.model.layers[0]._gradient_checkpointing_func is not own
        other = copy.deepcopy(model)

    assert other.model.layers[0]._gradient_checkpointing_func.func is own.func
    assert model.model.layers[0]._gradient_checkpointing_func is own


def test_trace_can_be_pickled_and_copied(model):
    trace = recorded(model)

    for other in (pickle.loads(pickle.dumps(trace)), copy.deepcopy(trace)):
        assert other.agreement(trace).ok
        assert other.layers == trace.layers


def test_class_names_stay_what_they_are(model):
    """transformers keys recorders and sharding plans by `str(type(module))` and by name."""
    gate = model.model.layers[0].mlp.gate
    own = type(gate)
    with record_routing(model):
        assert type(gate) is not own
        assert str(type(gate)) == str(own)
        assert isinstance(gate, own)
        assert type(gate).__name__ == own.__name__
    assert type(gate) is own


def test_nothing_keeps_the_model_alive():
    """A trace holds no model, and nothing else holds one after the block."""
    model = tiny_model("qwen3_moe")
    trace = recorded(model)
    gate = weakref.ref(model.model.layers[0].mlp.gate)
    del model
    gc.collect()

    assert gate() is None
    assert trace.num_tokens == 16
