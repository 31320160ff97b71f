"""What recording and replaying expert routing costs, against a forward with nothing attached.

    python -m benchmarks.bench_routing [--rounds 15] [--json]

Models of one size, 8 layers of 64 experts with 8 for each token: one is bare, one is recorded and
replayed, one has transformers' own output recorders on its routers, whose hooks stay. A run of
decode is 32 tokens over a cache. Entering and leaving the scope is part of each run, and so is
making whole sequences of what was recorded.
"""

from __future__ import annotations

import argparse
import inspect
import time

import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

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


def trace_of(run, model) -> RoutingTrace:
    """Record one run."""
    with record_routing(model) as trace:
        run(model)
    return trace


def measure(rounds: int) -> list[Measured]:
    """Measure prefill and decode against a bare forward and against transformers' recorders."""
    # Bare and recorded on one model: two that are equal lie elsewhere in memory, and differ by more
    # than what is measured. Nothing is attached outside of the block.
    watched, hooked = build(), build()
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

        target = TARGETS[name]
        results += compare(
            f"{name}, against a bare forward",
            bare,
            {"record": recorded, "replay": replayed, "output recorders": upstream},
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
