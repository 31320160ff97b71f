"""How long a module tree takes, against `str(model)` and other viewers in the same run.

    python -m benchmarks.bench_tree [--rounds 7] [--json] [--no-slow]

All models are built on the meta device. "tree as text" is everything: walking, folding, writing.
treescope takes minutes for the large ones and is timed once there; --no-slow leaves that out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, DeepseekV3Config, LlamaConfig

from benchmarks.report import Measured, compare, print_table, write_json
from benchmarks.synthetic import synthetic_model
from patchlab.model.diff import diff_trees
from patchlab.model.tree import module_tree

SMALL = 1_000


def build_models() -> dict[str, nn.Module]:
    """Build the four models on the meta device."""
    llama = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    with torch.device("meta"):
        return {
            "bert-base": AutoModel.from_config(BertConfig()),
            "llama-1b": AutoModelForCausalLM.from_config(llama),
            "deepseek-v3": AutoModelForCausalLM.from_config(DeepseekV3Config()),
            "synthetic-50k": synthetic_model(50_000),
        }


def measure(case: str, model: nn.Module, rounds: int, *, slow: bool) -> list[Measured]:
    """Measure everything on one model."""
    tree = module_tree(model)
    large = len(tree) >= 10_000
    ours: dict[str, Callable[[], object]] = {
        "module_tree": lambda: module_tree(model),
        "tree as text": lambda: module_tree(model).to_text(),
        "tree as HTML": lambda: module_tree(model).to_html(),
        "diff as text": lambda: diff_trees(model, model).to_text(changes_only=True),
    }
    limit = 2.0 if large else 1.5
    results = compare(
        case,
        lambda: str(model),
        ours,
        rounds=3 if large else rounds,
        targets={"tree as text": limit, "tree as HTML": limit},
    )
    for name, run in viewers(model).items():
        once = len(tree) > SMALL
        if slow or not once:
            results.append(one_against_print(case, name, run, model, 1 if once else 3))
    return results


def viewers(model: nn.Module) -> dict[str, Callable[[], object]]:
    """Other viewers of module trees, those that are installed."""
    found: dict[str, Callable[[], object]] = {}
    try:
        import torchinfo

        found["torchinfo"] = lambda: str(torchinfo.summary(model, depth=99, verbose=0))
    except ImportError:
        print("torchinfo is not installed, left out")
    try:
        import treescope

        found["treescope"] = lambda: treescope.render_to_html(model)
    except ImportError:
        print("treescope is not installed, left out")
    return found


def one_against_print(
    case: str, name: str, run: Callable[[], object], model: nn.Module, rounds: int
) -> Measured:
    """Measure what is too slow for many rounds against `str(model)`, in turns."""
    ratios, times = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        str(model)
        middle = time.perf_counter()
        run()
        end = time.perf_counter()
        ratios.append((end - middle) / (middle - start))
        times.append(end - middle)
    ratios.sort()
    times.sort()
    return Measured(case, name, ratios[rounds // 2], 1e3 * times[rounds // 2], 0.0)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/tree.json")
    parser.add_argument("--no-slow", action="store_true", help="leave other viewers out where slow")
    arguments = parser.parse_args()
    results: list[Measured] = []
    facts: dict[str, object] = {}
    for case, model in build_models().items():
        tree = module_tree(model)
        facts[case] = {
            "modules": len(tree),
            "lines of print": str(model).count("\n") + 1,
            "lines of text": tree.to_text().count("\n") + 1,
            "bytes of HTML": len(tree.to_html().encode()),
        }
        print(case, facts[case])
        measured = measure(case, model, arguments.rounds, slow=not arguments.no_slow)
        print_table(measured)
        results += measured
    if arguments.json:
        print(f"written to {write_json('tree', results, facts)}")


if __name__ == "__main__":
    main()
