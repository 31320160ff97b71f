"""What recording and replaying refuse says what was found and what to do about it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from patchlab.errors import RoutingError
from patchlab.routing import RoutingTrace, find_routers, record_routing, replay_routing
from tests.routing.families import tiny_model, with_cache

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
MODEL = tiny_model("qwen3_moe")


class SilentRouter(nn.Module):
    """Chooses, and says of how many experts nowhere."""

    def forward(self, scores):
        return torch.topk(scores, 2)


class NarrowRouter(SilentRouter):
    """Says how many experts a token gets, and not of how many."""

    top_k = 2

    def forward(self, scores):
        return torch.topk(scores, self.top_k)


def recorded(model=MODEL, ids=IDS, **inputs):
    with torch.no_grad(), record_routing(model) as trace:
        model(ids, **inputs)
    return trace


def another_run_over_a_cache():
    whole = torch.cat([IDS, IDS], dim=1)
    with torch.no_grad():
        cache = MODEL(whole, use_cache=True).past_key_values
    with torch.no_grad(), replay_routing(MODEL, recorded()):
        MODEL(IDS, use_cache=True)
        MODEL(IDS[:, :1], use_cache=True, **with_cache(MODEL, cache))


def steps_beyond_the_trace():
    with torch.no_grad(), replay_routing(MODEL, recorded()):
        cache = MODEL(IDS, use_cache=True).past_key_values
        MODEL(IDS[:, :3], use_cache=True, **with_cache(MODEL, cache))


def twice_the_forwards():
    with torch.no_grad(), replay_routing(MODEL, recorded()):
        MODEL(IDS)
        MODEL(IDS)


def beam_search():
    with torch.no_grad(), record_routing(MODEL):
        MODEL.generate(IDS, max_new_tokens=3, num_beams=2, do_sample=False)


def part_alone(scope):
    hidden = torch.zeros(1, 4, MODEL.config.hidden_size)
    with torch.no_grad(), scope:
        MODEL.model.layers[0].mlp(hidden)


def no_tokens():
    with record_routing(MODEL):
        MODEL(attention_mask=torch.ones_like(IDS))


def calls_of_a_router_of_some_tokens(*, other_rows):
    model = tiny_model("ernie4_5_vl_moe_text")
    types = torch.zeros_like(IDS)
    types[:, 2:4] = 1
    trace = recorded(model, moe_mm_token_type_ids=types)
    with torch.no_grad(), replay_routing(model, trace):
        if other_rows:
            model(IDS, moe_mm_token_type_ids=1 - types)
        cache = model(IDS, moe_mm_token_type_ids=types, use_cache=True).past_key_values
        model(IDS[:, :1], moe_mm_token_type_ids=types[:, :1], **with_cache(model, cache))


def array():
    return np.tile(np.array([1, 2], dtype=np.int16), (16, 3, 1))


def with_an_expert_twice():
    experts = array()
    experts[5, 1] = 3
    return RoutingTrace.from_vllm(MODEL, experts)


def with_unknown_tokens():
    experts = array()
    experts[5, 1] = -1
    return RoutingTrace.from_vllm(MODEL, experts).to_vllm(dense=True)


def file_of_another_version(folder):
    path = folder / "trace.safetensors"
    recorded().save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={**metadata, "version": "99"})
    RoutingTrace.load(path)


REFUSED = {
    "more forwards than were recorded": (
        twice_the_forwards,
        "the trace has 2 sequences, 2 of which are used. Each forward takes the next ones",
    ),
    "a cache of another run": (
        another_run_over_a_cache,
        "so it continues another run than this replay has seen",
    ),
    "steps beyond the trace": (
        steps_beyond_the_trace,
        "sequence 0 of the trace ends after 8 tokens; .* 11 in all. Stop earlier, or leave",
    ),
    "beam search": (beam_search, "Generate with num_beams=1 inside record_routing"),
    "an expert twice": (
        with_an_expert_twice,
        r"token 5 has an expert twice, \[3, 3\]. A router never chooses so",
    ),
    "a part that is recorded alone": (
        lambda: part_alone(record_routing(MODEL)),
        "Call the model itself, not a part of it or its forward; .* compiled model to record",
    ),
    "a part that is replayed alone": (
        lambda: part_alone(replay_routing(MODEL, recorded())),
        "Call the model itself, not a part of it or its forward; .* compiled model to replay",
    ),
    "a router that gets other tokens": (
        lambda: calls_of_a_router_of_some_tokens(other_rows=True),
        "routes 4 rows here, the trace has 12 rows .* must be those of the recording",
    ),
    "a router that is called too often": (
        lambda: calls_of_a_router_of_some_tokens(other_rows=False),
        "runs once more than was recorded: the trace has 1 call of it. .* must follow one another",
    ),
    "a router that does not say its top k": (
        lambda: find_routers(nn.Sequential(SilentRouter())),
        r"0 \(SilentRouter\) .* does not say how many experts a token gets \(top_k\)",
    ),
    "a router that does not say its experts": (
        lambda: find_routers(nn.Sequential(NarrowRouter())),
        "does not say num_experts. Give the module an attribute of that name",
    ),
    "a sequence that is not there": (
        lambda: recorded().sequence(2),
        "sequence 2 of a trace of 2: count from 0",
    ),
    "a forward without tokens": (
        no_tokens,
        "was called without input_ids or inputs_embeds, .* Call it with one of them, by name",
    ),
    "a number for a list of tensors": (
        lambda: RoutingTrace.from_list(MODEL, 3),
        r"routes are of type int, expected a list of tensors \(num_tokens, top_k\)",
    ),
    "what is no routes at all": (
        lambda: replay_routing(MODEL, 3).__enter__(),
        "routes are of type int; expected a RoutingTrace, a list of tensors",
    ),
    "more requests than prompts": (
        lambda: RoutingTrace.from_vllm(MODEL, [array(), array()], prompt=[array()]),
        "1 prompt arrays for 2 requests. Give one for each request, None for one",
    ),
    "text that is no base64": (
        lambda: RoutingTrace.from_sglang(MODEL, "!!"),
        "SGLang returns them as text in meta_info",
    ),
    "an array of three dimensions as a batch": (
        lambda: RoutingTrace.from_verl(MODEL, array()),
        r"routes of shape \(16, 3, 2\), expected \(batch, length, layers, top_k\)",
    ),
    "a mask of another batch": (
        lambda: RoutingTrace.from_verl(MODEL, array()[None], torch.ones(2, 8)),
        r"attention_mask of shape \(2, 8\) for routes of 1 × 16 tokens. Give the mask of the batch",
    ),
    "unknown tokens among dense layers": (with_unknown_tokens, "Use dense=False, which says -1"),
    "several sequences as one array": (
        lambda: recorded().to_vllm(),
        r"the trace has 2 sequences; .* take each with trace.sequence\(number\)",
    ),
    "numbers that are no integers": (
        lambda: RoutingTrace.from_vllm(MODEL, array().astype(np.float32)),
        "request 0 holds float32, expected integers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_says_what_was_found_and_what_to_do(case):
    refused, told = REFUSED[case]

    with pytest.raises(RoutingError, match=told):
        refused()


def test_trace_of_another_version_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(RoutingError, match=r"of version '99'.* Write it again, or update"):
        file_of_another_version(tmp_path)
