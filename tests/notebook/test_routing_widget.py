"""The routing widget: what goes to the browser, and what stands beside it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchlab.errors import RoutingError
from patchlab.notebook.routing_widget import MOST_TOKENS, RoutingWidget
from patchlab.routing import RoutingTrace, TokenBlock, record_routing
from tests.routing.families import output, tiny_model, tokens

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


class Tokenizer:
    def convert_ids_to_tokens(self, ids):
        return [f"<{number}>" for number in ids]


def recorded(family="deepseek_v3", seed=0, **options):
    model = tiny_model(family, seed=seed)
    inputs = {**tokens(model), "input_ids": IDS, **options}
    with torch.no_grad(), record_routing(model) as trace:
        output(model, inputs)
    return trace


def experts_of(widget, name="experts"):
    packed = np.frombuffer(getattr(widget, name), "<i2")
    return packed.reshape(len(widget.facts["layers"]), widget.facts["tokens"], -1)


def test_browser_gets_the_load_and_the_experts():
    trace = recorded()

    widget = RoutingWidget(trace)

    assert widget.facts["layers"] == [1, 2]
    assert widget.facts["load"] == [load.tolist() for load in trace.load_per_expert().values()]
    for row, index in zip(experts_of(widget), trace.to_list(), strict=True):
        assert row.tolist() == index.tolist()
    assert widget.other_experts == b""


def test_second_trace_goes_along_and_the_twin_compares():
    trace, other = recorded(), recorded(seed=9)

    widget = RoutingWidget(trace, other)

    assert widget.facts["compared"]
    assert experts_of(widget, "other_experts")[1].tolist() == other.to_list()[1].tolist()
    assert widget.to_text() == trace.agreement(other).to_text()
    assert "have the same experts" in repr(widget)


def test_second_trace_is_laid_under_the_tokens_of_the_first():
    """A training step runs one token more of each sequence than the generation it follows."""
    rollout, step = recorded(seed=9), recorded()
    with_one_less = {
        fqn: index.reshape(2, 8, -1)[:, :-1].flatten(0, 1) for fqn, index in rollout.indices.items()
    }
    routes = replace(rollout.routes, indices=with_one_less, blocks={"model": (TokenBlock(2, 7),)})
    rollout = RoutingTrace(routes)

    widget = RoutingWidget(rollout, step)

    own, other = np.sort(experts_of(widget)), np.sort(experts_of(widget, "other_experts"))
    same = (own == other).all(axis=-1).sum(axis=1)
    assert same.tolist() == [layer.same_sets for layer in rollout.agreement(step).layers]
    assert other.min() >= 0


def test_tokens_are_named():
    trace = recorded()

    assert RoutingWidget(trace).facts["names"] == []
    assert RoutingWidget(trace, token_ids=IDS).facts["names"][0] == str(int(IDS[0, 0]))
    named = RoutingWidget(trace, token_ids=IDS, tokenizer=Tokenizer())
    assert named.facts["names"][-1] == f"<{int(IDS[1, 7])}>"


def test_only_so_many_tokens_go_over():
    ids = IDS.repeat(1, MOST_TOKENS // 8)  # Twice as many.
    model = tiny_model("qwen3_moe", max_position_embeddings=2 * MOST_TOKENS)
    with torch.no_grad(), record_routing(model) as trace:
        model(ids)

    widget = RoutingWidget(trace, token_ids=ids)

    assert widget.facts["tokens"] == MOST_TOKENS == len(widget.facts["names"])
    assert widget.facts["all_tokens"] == 2 * MOST_TOKENS
    assert sum(widget.facts["load"][0]) == 2 * MOST_TOKENS * 2


def test_of_an_encoder_decoder_the_decoder_is_shown():
    widget = RoutingWidget(recorded("switch_transformers", decoder_input_ids=IDS[:, :5]))

    assert all(fqn.startswith("decoder.") for fqn in widget.facts["routers"])
    assert widget.facts["tokens"] == 10


def test_text_and_html_stand_beside_the_widget():
    trace = recorded()
    bundle, _ = RoutingWidget(trace)._repr_mimebundle_()

    assert bundle["text/plain"] == trace.to_text()
    assert bundle["text/html"] == trace.to_html()
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_errors_of_the_browser_are_kept():
    widget = RoutingWidget(recorded())
    widget._receive(widget, {"type": "error", "message": "broken"}, [])

    assert widget.errors == ("broken",)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"token_ids": [1, 2]}, "2 token ids for a trace of 16 tokens"),
        ({"tokenizer": Tokenizer()}, "a tokenizer without token_ids"),
    ],
)
def test_names_that_do_not_fit_are_refused(options, match):
    with pytest.raises(RoutingError, match=match):
        RoutingWidget(recorded(), **options)


def test_traces_of_other_routers_are_refused():
    with pytest.raises(RoutingError, match="other routers"):
        RoutingWidget(recorded(), recorded("qwen3_moe"))
