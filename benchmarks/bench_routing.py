"""What recording and replaying expert routing costs, against a forward with nothing attached.

    python -m benchmarks.bench_routing [--rounds 15] [--json]

Models of one size, 8 layers of 64 experts with 8 for each token: one is recorded and replayed, one
has transformers' own output recorders on its routers, whose hooks stay, and one has routers of a
class that can be told its experts, recorded by an output recorder: the recipe of the transformers
guide to monkey patching. Hooks by hand keep what a router returns, and nothing that says which
token it belongs to. A run of decode is 32 tokens over a cache. Entering and leaving the scope is
part of each run, and so is making whole sequences of what was recorded.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder

import patchlab
from benchmarks.report import Measured, compare, print_table, write_json
from patchlab.routing import RoutingTrace, find_routers, record_routing, replay_routing

PREFILL, STEPS = 256, 32
TARGETS = {"prefill": 1.02, "decode": 1.05}
# Layers with experts, experts, experts for each token: of the published configurations.
FAMILIES = {
    "Qwen3-30B-A3B": (48, 128, 8),
    "DeepSeek-V3": (58, 256, 8),
    "Kimi-K2": (60, 384, 8),
}


def build() -> Qwen3MoeForCausalLM:
    """Build the model, equal each time."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=8,
    )
    return Qwen3MoeForCausalLM(config).eval()


def prefill(model: Qwen3MoeForCausalLM, **options: bool) -> None:
    """Run a prompt."""
    model(torch.arange(PREFILL).unsqueeze(0), use_cache=False, **options)


def decode(model: Qwen3MoeForCausalLM, **options: bool) -> None:
    """Run tokens one by one."""
    cache = DynamicCache(config=model.config)
    names = inspect.signature(model.forward).parameters
    handed = {"cache" if "cache" in names else "past_key_values": cache}
    for token in range(STEPS):
        model(torch.tensor([[token]]), use_cache=True, **handed, **options)


class ToldRouter(Qwen3MoeTopKRouter):
    """A router that takes the experts it is told, as the guide's recipe has it."""

    told: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits, scores and indices."""
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits = functional.softmax(functional.linear(flat, self.weight), dim=-1, dtype=torch.float)
        if self.told is None:
            scores, indices = torch.topk(logits, self.top_k, dim=-1)
        else:
            indices = self.told
            scores = logits.gather(-1, indices)
        if self.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(logits.dtype), indices


def build_recipe() -> Qwen3MoeForCausalLM:
    """Build a model with those routers and the output recorder for them."""
    with patchlab.patched({"Qwen3MoeTopKRouter": ToldRouter}, on_finding="ignore"):
        model = build()
    inner = model.model
    known = _CAN_RECORD_REGISTRY.get(inner) or {}
    recorder = OutputRecorder(ToldRouter, index=2)
    _CAN_RECORD_REGISTRY[inner] = {**known, "selected_experts": recorder}
    return model


def hooked_by_hand(
    run: Callable[..., None], model: Qwen3MoeForCausalLM
) -> dict[str, list[torch.Tensor]]:
    """Run with a hook on each router that keeps the indices."""
    kept: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, output, fqn=fqn: kept.setdefault(fqn, []).append(output[2])
        )
        for fqn, module in model.named_modules()
        if isinstance(module, Qwen3MoeTopKRouter)
    ]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    return kept


def trace_of(run, model) -> RoutingTrace:
    """Record one run."""
    with record_routing(model) as trace:
        run(model)
    return trace


def measure(rounds: int) -> list[Measured]:
    """Measure prefill and decode against a bare forward and against transformers' recorders."""
    # Bare and recorded on one model: two that are equal lie elsewhere in memory, and differ by more
    # than what is measured. Nothing is attached outside of the block.
    watched, hooked, recipe = build(), build(), build_recipe()
    results: list[Measured] = []
    for name, run in (("prefill", prefill), ("decode", decode)):
        trace = trace_of(run, watched)

        def bare(run=run) -> None:
            run(watched)

        def recorded(run=run) -> None:
            with record_routing(watched):
                run(watched)

        def replayed(run=run, trace=trace) -> None:
            with replay_routing(watched, trace):
                run(watched)

        def upstream(run=run) -> None:
            run(hooked, output_router_logits=True)

        def by_hand(run=run) -> None:
            hooked_by_hand(run, watched)

        def by_recipe(run=run) -> None:
            run(recipe, output_selected_experts=True)

        target = TARGETS[name]
        results += compare(
            f"{name}, against a bare forward",
            bare,
            {
                "record": recorded,
                "replay": replayed,
                "hooks by hand": by_hand,
                "output recorders": upstream,
                "the guide's recipe, recorded": by_recipe,
            },
            rounds=rounds,
            targets={"record": target},
        )
        results += compare(
            f"{name}, against output recorders",
            upstream,
            {"record": recorded},
            rounds=rounds,
            targets={"record": target},
        )
    return results


def facts() -> dict[str, object]:
    """Bytes for each token, and what a scope costs on a model of 48 layers."""
    found: dict[str, object] = {}
    for name, (layers, experts, top_k) in FAMILIES.items():
        size = 1 if experts <= 256 else 2
        found[f"{name}, bytes per token"] = layers * top_k * size
        found[f"{name}, bytes per token in int64"] = layers * top_k * 8
    config = Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
    )
    model = Qwen3MoeForCausalLM(config)
    find_routers(model)
    for what, block in (
        ("find routers", lambda: find_routers(model)),
        ("scope", lambda: scope(model)),
    ):
        start = time.perf_counter()
        for _ in range(20):
            block()
        found[f"{what} of 48 layers, ms"] = round((time.perf_counter() - start) * 1e3 / 20, 2)
    return found


def scope(model: Qwen3MoeForCausalLM) -> None:
    """Enter and leave."""
    with record_routing(model):
        pass


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        results = measure(options.rounds)
        told = facts()
    print_table(results)
    for name, value in told.items():
        print(f"{name}: {value}")
    if options.json:
        write_json("routing", results, told)


if __name__ == "__main__":
    main()
