"""Ways to generate: whatever is drafted, sampled or taken back, the trace is of what stayed."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from patchlab.routing import record_routing, replay_routing
from tests.routing.families import tiny_model, with_cache

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_moe")


def teacher_forced(model, ids):
    with torch.no_grad(), record_routing(model) as trace:
        model(ids)
    return trace


def generated(model, ids, length=8, **options):
    with torch.no_grad(), record_routing(model) as trace:
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
            **options,
        )
    return trace, sequences


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 3}, {"assistant": 5}])
def test_drafted_tokens_that_did_not_stay_are_not_in_the_trace(model, drafts):
    """The last draft too, which no later forward takes back."""
    if "assistant" in drafts:
        drafts = {"assistant_model": tiny_model("qwen3_moe", seed=drafts["assistant"])}
    repeating = IDS[:1, :2].repeat(1, 4)

    trace, sequences = generated(model, repeating, do_sample=False, **drafts)

    assert trace.num_tokens == sequences.shape[1] - 1
    assert trace.agreement(teacher_forced(model, sequences)).ok


def test_taking_back_is_seen_in_the_block_and_after_it(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS, **with_cache(model, cache))
        model(IDS[:, :4], **with_cache(model, cache))
        assert trace.num_tokens == 24
        cache.crop(-3)
        assert trace.num_tokens == 18
        cache.crop(-1)

    assert trace.agreement(teacher_forced(model, IDS)).ok


def test_cache_of_a_draft_is_not_kept_alive(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS, **with_cache(model, cache))
        model(IDS[:, :4], **with_cache(model, cache))
    reference = weakref.ref(cache)
    del cache
    gc.collect()

    assert reference() is None
    assert trace.num_tokens == 24


def test_several_sequences_of_one_prompt_are_sequences_of_their_own(model):
    torch.manual_seed(0)
    trace, sequences = generated(model, IDS, do_sample=True, num_return_sequences=3)

    assert trace.num_sequences == 6
    assert trace.agreement(teacher_forced(model, sequences)).ok


def test_model_may_change_its_type_in_the_block():
    model = tiny_model("qwen3_moe")
    expected = teacher_forced(model, IDS)
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS)
        model.to(torch.bfloat16)
        model(IDS)

    assert trace.num_sequences == 4
    assert trace.sequence(1).agreement(expected.sequence(1)).ok
    with torch.no_grad(), replay_routing(model, expected), record_routing(model) as imposed:
        model(IDS)
    assert imposed.agreement(expected).ok
