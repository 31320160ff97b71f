"""What a preview costs, against building the two skeletons it is read from.

    python -m benchmarks.bench_preview [--rounds 5] [--json]

The baseline builds the model twice on the meta device, once in a scope, and leaves it at that.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch import nn

import patchlab
from benchmarks.report import Measured, compare, print_table, write_json
from patchlab.model.catalog import load_catalog

TARGET = 1.3


class Anything(nn.Module):
    """Takes the place of anything and passes its first argument on."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(  # noqa: D102
        self, hidden_states: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        return hidden_states


CASES = {
    "bert-base, .*Attention": (transformers.BertConfig, transformers.BertModel, ".*Attention"),
    "llama-7b, LlamaMLP": (transformers.LlamaConfig, transformers.LlamaModel, "LlamaMLP"),
    "qwen2-moe, .*Experts$": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeModel,
        ".*Experts$",
    ),
    "deepseek-v3, .*MLP$": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3Model,
        ".*MLP$",
    ),
}


def measure(rounds: int) -> list[Measured]:
    """Measure each case."""
    load_catalog()
    results: list[Measured] = []
    for name, (config_class, model_class, key) in CASES.items():
        config, mapping = config_class(), {key: Anything}

        def two_skeletons(config=config, model_class=model_class, mapping=mapping) -> None:
            with torch.device("meta"):
                model_class(config)
                with patchlab.patched(mapping, on_finding="ignore"):
                    model_class(config)

        def one_preview(config=config, mapping=mapping) -> None:
            patchlab.preview(config, mapping)

        results += compare(
            name,
            two_skeletons,
            {"preview": one_preview},
            rounds=rounds,
            targets={"preview": TARGET},
        )
    return results


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = measure(options.rounds)
    print_table(results)
    if options.json:
        write_json("preview", results, {})


if __name__ == "__main__":
    main()
