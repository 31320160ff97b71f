"""Recording: what is in a trace, and what is not."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from patchlab.errors import RoutingError
from patchlab.routing import find_routers, record_routing, replay_routing
from tests.routing.families import (
    image_tokens,
    tiny_model,
    tiny_vision_language_model,
    tokens,
    with_cache,
)

IDS = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_moe")


def generate(model, ids=IDS, **options):
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6, **options}
    with torch.no_grad(), record_routing(model) as trace:
        sequences = model.generate(ids, **options)
    return sequences, trace


def teacher_forced(model, sequences, **options):
    with torch.no_grad(), record_routing(model) as trace:
        model(sequences, **options)
    return trace


def test_trace_names_layers_and_shapes():
    """Layers without a router are known as such; indices have the smallest integer type."""
    model = tiny_model("deepseek_v3")

    trace = teacher_forced(model, IDS)

    assert trace.layers == ("model.layers.1.mlp.gate", "model.layers.2.mlp.gate")
    assert trace.num_layers == 3
    assert trace.dense_layers == (0,)
    assert (trace.num_experts, trace.top_k, trace.num_tokens) == (8, 2, 14)
    assert {index.dtype for index in trace.indices.values()} == {torch.uint8}
    assert trace.nbytes == 2 * 14 * 2


@pytest.mark.parametrize(
    ("family", "layers", "dense"),
    [("longcat_flash", 2, ()), ("dbrx", 3, ()), ("jamba", 4, (0, 2)), ("nemotron_h", 5, (0, 2, 4))],
)
def test_layers_are_counted_in_the_model(family, layers, dense):
    """Configs count other things: LongCat-Flash twice each layer, Nemotron-H does not say."""
    trace = teacher_forced(tiny_model(family), IDS)

    assert (trace.num_layers, trace.dense_layers) == (layers, dense)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "jamba", "qwen3_next"])
def test_generation_is_recorded_as_whole_sequences(family):
    """Prefill and decode are joined: the trace is that of a forward over what was generated."""
    model = tiny_model(family)

    sequences, trace = generate(model)

    assert sequences.shape == (2, 13)
    assert trace.num_sequences == 2
    assert trace.num_tokens == 2 * 12
    assert trace.agreement(teacher_forced(model, sequences)).same_sets == 1.0


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 3}, {"cache_implementation": "static"}])
def test_chunked_prefill_and_static_cache_are_joined(model, options):
    sequences, trace = generate(model, **options)

    assert trace.num_sequences == 2
    assert trace.agreement(teacher_forced(model, sequences)).ok


def test_tokens_taken_back_are_not_in_the_trace(model):
    """A cache that is cropped, as assisted decoding does, takes its tokens out of the trace."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS[:1, :5], **with_cache(model, cache))
        model(torch.tensor([[7, 8, 9]]), **with_cache(model, cache))
        cache.crop(-2)
        model(IDS[:1, 5:], **with_cache(model, cache))

    expected = torch.cat([IDS[:1, :5], torch.tensor([[7]]), IDS[:1, 5:]], dim=1)
    assert trace.num_sequences == 1
    assert trace.agreement(teacher_forced(model, expected)).ok


def test_tokens_cached_before_the_block_are_unknown(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :4], **with_cache(model, cache))
        with record_routing(model) as trace:
            model(IDS[:, 4:], **with_cache(model, cache))

    index = trace.indices[trace.layers[0]].unflatten(0, (2, 7))
    assert bool((index[:, :4] == -1).all())
    assert bool((index[:, 4:] >= 0).all())
    assert index.dtype is torch.int8


def test_batches_follow_one_another(model):
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS)
        model(IDS[:, :4])

    whole, part = teacher_forced(model, IDS), teacher_forced(model, IDS[:, :4])
    assert [block.length for block in trace.blocks["model"]] == [7, 4]
    assert trace.num_tokens == 14 + 8
    for fqn in trace.layers:
        expected = torch.cat([whole.indices[fqn], part.indices[fqn]])
        assert torch.equal(trace.indices[fqn], expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_route(model, side):
    """Padded positions are -1; the tokens beside them have the routes they have alone."""
    mask = torch.ones_like(IDS)
    pads = slice(0, 3) if side == "left" else slice(4, 7)
    mask[0, pads] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    trace = teacher_forced(model, IDS, attention_mask=mask, position_ids=positions)

    index = trace.indices[trace.layers[0]].unflatten(0, (2, 7))
    assert bool((index[0, pads] == -1).all())
    assert int((index == -1).sum()) == 3 * 2
    alone = teacher_forced(model, IDS[:1][:, mask[0].bool()])
    assert trace.sequence(0).agreement(alone).ok
    assert trace.sequence(0).num_tokens == 4


@pytest.mark.parametrize("static", [False, True])
def test_padded_generation_is_recorded_without_its_padding(model, static):
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    options = {"cache_implementation": "static"} if static else {}

    sequences, trace = generate(model, attention_mask=mask, **options)

    alone = teacher_forced(model, sequences[:1, 3:])
    assert trace.sequence(0).num_tokens == 4 + 5
    assert trace.sequence(0).agreement(alone).same_sets == 1.0


def test_base_model_and_head_give_the_same(model):
    head, base = teacher_forced(model, IDS), teacher_forced(model.model, IDS)

    assert base.layers[0] == "layers.0.mlp.gate"
    assert head.agreement(base).ok


def test_vision_language_model_is_recorded_with_its_images():
    """Its text model gets embeddings and a mask; images have routes as text has, in steps too."""
    model = tiny_vision_language_model()
    inputs = image_tokens(model)
    with torch.no_grad():
        with record_routing(model) as trace:
            plain = model(**inputs).logits
        with replay_routing(model, trace):
            assert torch.equal(model(**inputs).logits, plain)
        with record_routing(model) as generated:
            model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    assert trace.layers[0] == "model.language_model.layers.0.mlp.gate"
    assert trace.num_tokens == 24
    assert int((trace.to_list()[0] < 0).sum()) == 2
    assert [block.length for block in generated.blocks["model.language_model"]] == [15]
    for fqn in trace.layers:
        start = generated.indices[fqn].unflatten(0, (2, 15))[:, :12].flatten(0, 1)
        assert torch.equal(start, trace.indices[fqn])


def test_encoder_and_decoder_have_their_own_tokens():
    model = tiny_model("switch_transformers")

    trace = teacher_forced(model, **{"sequences": IDS, "decoder_input_ids": IDS[:, :5]})

    assert {key: blocks[0].length for key, blocks in trace.blocks.items()} == {
        "encoder": 7,
        "decoder": 5,
    }
    assert trace.num_tokens == 10
    with pytest.raises(RoutingError, match="different tokens"):
        trace.to_vllm()


def test_encoder_runs_once_in_a_generation():
    model = tiny_model("switch_transformers")

    sequences, trace = generate(model)

    assert trace.blocks["encoder"][0].num_tokens == 14
    assert trace.num_tokens == 2 * (sequences.shape[1] - 1)


def test_router_of_some_tokens_is_kept_call_by_call():
    """Text and vision experts see different tokens; each keeps its own rows, and replays them."""
    model = tiny_model("ernie4_5_vl_moe_text")
    types = torch.zeros_like(IDS)
    types[:, 2:4] = 1
    inputs = {"input_ids": IDS, "moe_mm_token_type_ids": types}
    with torch.no_grad(), record_routing(model) as trace:
        plain = model(**inputs).last_hidden_state

    text, vision = "layers.1.mlp.text_moe.gate", "layers.1.mlp.vision_moe.gate"
    assert trace.indices[text].shape == (10, 2)
    assert trace.indices[vision].shape == (4, 2)
    with torch.no_grad(), replay_routing(model, trace):
        assert torch.equal(model(**inputs).last_hidden_state, plain)
    with torch.no_grad(), replay_routing(model, trace), pytest.raises(RoutingError, match="4 rows"):
        model(input_ids=IDS, moe_mm_token_type_ids=1 - types)


def test_failed_and_interrupted_forwards_leave_nothing(model):
    """A pass that does not come to its end is not in the trace, and the next one is."""
    layer = model.model.layers[1]
    for error in (KeyboardInterrupt, RuntimeError):
        handle = None

        def fail(*args, error=error):
            raise error

        with torch.no_grad(), record_routing(model) as trace:
            handle = layer.register_forward_hook(fail)
            with pytest.raises(error):
                model(IDS)
            handle.remove()
            assert trace.num_tokens == 0
            model(IDS)

        assert trace.agreement(teacher_forced(model, IDS)).ok


def test_trace_grows_in_the_block_and_stays_after_it(model):
    with torch.no_grad(), record_routing(model) as trace:
        assert trace.num_tokens == 0
        model(IDS)
        assert trace.num_tokens == 14
    with torch.no_grad():
        model(IDS)

    assert trace.num_tokens == 14


def test_beam_search_is_refused(model):
    with record_routing(model), pytest.raises(RoutingError, match="num_beams=1"):
        model.generate(IDS, num_beams=2, max_new_tokens=3)

    assert model.generate(IDS, num_beams=2, max_new_tokens=3).shape[0] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_recorded_bit_for_bit(model, dtype):
    half = tiny_model("qwen3_moe").to(dtype)
    with torch.no_grad():
        plain = half(IDS).logits
        with record_routing(half) as trace:
            assert torch.equal(half(IDS).logits, plain)

    assert trace.num_tokens == 14


def test_autocast_is_recorded_bit_for_bit(model):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(IDS).logits
        with record_routing(model):
            assert torch.equal(model(IDS).logits, plain)


def test_hook_with_a_topk_of_its_own_is_no_choice(model):
    """A hook on a router that ranks the experts for itself changes nothing in the trace."""
    expected = teacher_forced(model, IDS)
    gate = model.model.layers[0].mlp.gate
    handle = gate.register_forward_hook(lambda module, args, out: (-out[0]).topk(2) and None)
    try:
        with record_routing(model) as trace:  # With gradients: every operation is watched.
            model(IDS)
    finally:
        handle.remove()

    assert trace.agreement(expected).ok


def test_router_with_a_forward_of_its_own_is_watched():
    """accelerate puts a forward on the instance; it is asked like any other."""
    model = tiny_model("qwen3_moe")
    expected = teacher_forced(model, IDS)
    gate = model.model.layers[0].mlp.gate
    own = gate.forward

    def placed(*args):
        return own(*args)

    gate.forward = placed

    assert teacher_forced(model, IDS).agreement(expected).ok
    assert vars(gate)["forward"] is placed


def test_static_cache_handed_in_is_counted(model):
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS[:, :4], **with_cache(model, cache))
        model(IDS[:, 4:], **with_cache(model, cache))

    assert trace.agreement(teacher_forced(model, IDS)).ok


def test_model_without_router_is_refused():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )
    with (
        pytest.raises(RoutingError, match="no router"),
        record_routing(LlamaForCausalLM(config)),
    ):
        pytest.fail("the block must not run")


def test_block_replaced_by_something_that_does_not_ask_its_router_is_refused():
    """Nothing that replaces the block around a router goes unnoticed."""
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.forward = lambda hidden_states: hidden_states

    with record_routing(model), pytest.raises(RoutingError, match="none of the routers"):
        model(IDS)


class ToyRouter(nn.Module):
    """Chooses by `sort`, which is no choice that can be seen; its source mentions topk( too."""

    def __init__(self):
        super().__init__()
        self.top_k, self.num_experts = 2, 4
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden_states):
        return (hidden_states @ self.weight.T).sort(dim=-1).values


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.router = ToyRouter()

    def forward(self, input_ids):
        return self.router(self.embed(input_ids))


def test_router_whose_choice_is_not_seen_is_refused():
    model = ToyModel()
    with record_routing(model), pytest.raises(RoutingError, match="made no choice"):
        model(torch.tensor([[1, 2]]))


def test_part_of_a_model_cannot_be_placed(model):
    with record_routing(model), pytest.raises(RoutingError, match="no call of Qwen3MoeModel"):
        model.model.layers[0].mlp.gate(torch.zeros(3, 32))


def test_routers_are_found_by_name_and_in_layer_order():
    sites = find_routers(tiny_model("jetmoe"))

    assert [site.layer for site in sites] == [0, 0, 1, 1, 2, 2]
    assert all(site.top_k == 2 and site.num_experts == 8 for site in sites)


def test_tokens_helper_gives_what_a_family_takes():
    """Guards the table of families: its inputs are of the model's own kind."""
    assert set(tokens(tiny_model("switch_transformers"))) == {"input_ids", "decoder_input_ids"}
