"""How time grows with what there is: modules, classes, layers, tokens, threads.

    ./dev bench growth [--rounds 5] [--quick] [--json] [--plot FILE]

Each curve is measured at sizes that double or more, and its slope on logarithmic axes is fitted
over the upper half of them: 1 is linear, 0 is a fixed cost, 2 would be quadratic. The curves are
drawn as small plots, an SVG beside the figures (or the file that is named).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel, Qwen3MoeConfig, Qwen3MoeModel
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from benchmarks.report import RESULTS, print_facts, write_json
from benchmarks.synthetic import synthetic_model
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.routing.trace import Router, Routes, RoutingTrace, TokenBlock

LONG = 1500
"""Milliseconds after which something is not measured once more."""

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}


class Mine(LlamaMLP):
    """A replacement that changes nothing."""


@dataclass(frozen=True)
class Curve:
    """What takes how long at which size.

    Attributes:
        of: What grows.
        name: What is timed.
        sizes: Increasing.
        milliseconds: The shortest of some rounds, one for each size.
        linear: Whether it may grow as fast as what there is; otherwise it should hardly grow.
    """

    of: str
    name: str
    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]
    linear: bool = True

    @property
    def slope(self) -> float:
        """The slope on logarithmic axes, over the upper half of the sizes."""
        half = len(self.sizes) // 2
        x = [math.log(size) for size in self.sizes[half:]]
        y = [math.log(taken) for taken in self.milliseconds[half:]]
        return statistics.linear_regression(x, y).slope


def least(work: Callable[[], object], rounds: int) -> float:
    """Return the shortest time of a call in milliseconds: what else a machine does only adds.

    The first call is not counted, unless it took so long that what it warmed up is nothing.
    """
    gc.collect()
    times: list[float] = []
    for count in range(rounds + 1):
        start = time.perf_counter()
        work()
        taken = (time.perf_counter() - start) * 1e3
        if count or taken > LONG:
            times.append(taken)
        if sum(times) > LONG:
            break
    return min(times)


def grown(
    of: str,
    sizes: list[int],
    works: Callable[[int], contextlib.AbstractContextManager[dict[str, Callable[[], object]]]],
    rounds: int,
    *,
    fixed: tuple[str, ...] = (),
) -> list[Curve]:
    """Measure what `works(size)` offers at each size; those that are `fixed` should not grow."""
    real: list[int] = []
    taken: dict[str, list[float]] = {}
    for size in sizes:
        with works(size) as named:
            size = int(named.pop("size", lambda size=size: size)())
            real.append(size)
            for name, work in named.items():
                taken.setdefault(name, []).append(least(work, rounds))
    return [
        Curve(of, name, tuple(real), tuple(times), name not in fixed)
        for name, times in taken.items()
    ]


@contextlib.contextmanager
def with_modules(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Offer what is done with a tree of so many modules, about."""
    with torch.device("meta"):  # 300,000 modules with weights would take 5 GB.
        model = synthetic_model(size)
        other = patchlab.module_tree(synthetic_model(size))
    tree = patchlab.module_tree(model)
    yield {
        "size": lambda: len(tree),
        "module_tree": lambda: patchlab.module_tree(model),
        # A tree is folded when it is first shown, which takes a look at every module.
        "to_text": lambda: replace(tree).to_text(),
        "to_html": lambda: replace(tree).to_html(),
        "to_html again": tree.to_html,
        "diff_trees": lambda: patchlab.diff_trees(tree, other),
        "widget": lambda: TreeWidget(replace(tree)).close(),
    }


@contextlib.contextmanager
def with_classes(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Offer a scope whose pattern fits so many classes."""
    made = [
        type(f"Grown{number}MLP", (nn.Module,), {"__module__": "transformers.models.grown"})
        for number in range(size)
    ]
    module = type(patchlab)("transformers.models.grown")
    vars(module).update({cls.__name__: cls for cls in made})
    sys.modules[module.__name__] = module

    def scope(mapping: dict[str, type[nn.Module]]) -> None:
        with patchlab.patched(mapping, on_finding="ignore"):
            pass

    try:
        yield {
            "scope, all match": lambda: scope({r"^Grown\d+MLP$": Mine}),
            "scope, one matches": lambda: scope({"LlamaMLP": Mine}),
        }
    finally:
        del sys.modules[module.__name__]


@contextlib.contextmanager
def with_layers(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Offer what is done with models of so many layers."""
    config = LlamaConfig(**SIZES, num_hidden_layers=size)
    moe = Qwen3MoeConfig(
        **SIZES, num_hidden_layers=size, moe_intermediate_size=8, num_experts=4, head_dim=4
    )
    model, sparse = LlamaModel(config), Qwen3MoeModel(moe)

    def built() -> None:
        with torch.device("meta"), patchlab.patched({"LlamaMLP": Mine}, on_finding="ignore"):
            LlamaModel(config)

    def record() -> None:
        with patchlab.record_routing(sparse):
            pass

    yield {
        "build in a scope": built,
        "preview": lambda: patchlab.preview(config, {"LlamaMLP": Mine}),
        "swap + undo": lambda: patchlab.swap(model, {"LlamaMLP": Mine}).undo(),
        "record_routing": record,
    }


@contextlib.contextmanager
def with_tokens(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Offer what is done with a trace of so many tokens in eight layers."""
    fqns = [f"model.layers.{layer}.mlp.gate" for layer in range(8)]
    routers = tuple(Router(fqn, layer, 64, 8, "model") for layer, fqn in enumerate(fqns))
    index = torch.rand(size, 64).topk(8).indices.to(torch.uint8)
    indices = dict.fromkeys(fqns, index)
    trace = RoutingTrace(Routes(routers, indices, {"model": (TokenBlock(1, size),)}))
    path = RESULTS / "growth.safetensors"
    try:
        yield {
            "balance": trace.balance,
            "agreement": lambda: trace.agreement(trace),
            "save": lambda: trace.save(path),
            "to_vllm": trace.to_vllm,
        }
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def with_threads(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Offer scopes of so many threads at once, each with a model of its own."""
    config = LlamaConfig(**SIZES, num_hidden_layers=2)

    def work() -> None:
        # On the CPU: torch lets one thread at a time choose a device for a block.
        with patchlab.patched({"LlamaMLP": Mine}, on_finding="ignore"):
            LlamaModel(config)

    def together() -> None:
        running = [threading.Thread(target=work) for _ in range(size)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    yield {"build in scopes": together}


def measure(rounds: int, *, quick: bool) -> list[Curve]:
    """Measure all curves."""
    step = 2 if quick else 1
    half_decades = [round(10 ** (2 + half / 2)) for half in range(0, 5 if quick else 8, step)]
    doubling = [2**power for power in range(1, 6 if quick else 8)]
    RESULTS.mkdir(exist_ok=True)
    return [
        *grown("modules", half_decades, with_modules, rounds, fixed=("to_html again",)),
        *grown(
            "classes",
            [10 * size for size in doubling],
            with_classes,
            rounds,
            fixed=("scope, one matches",),
        ),
        *grown("layers", doubling, with_layers, rounds),
        *grown("tokens", [64 * size for size in doubling], with_tokens, rounds),
        *grown("threads", doubling[:6], with_threads, rounds),
    ]


def plot(curves: list[Curve], path: Path) -> None:
    """Draw one small plot for each thing that grows, a dashed line for what is linear."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(curve.of for curve in curves))
    figure = Figure(figsize=(3.2 * len(kinds), 3.4), layout="constrained")
    for place, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), place + 1)
        _draw(axes, [curve for curve in curves if curve.of == kind])
        axes.set_title(f"ms by number of {kind}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white")


def _draw(axes: Any, curves: list[Curve]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for curve in curves:
        label = f"{curve.name}, slope {curve.slope:.2f}"
        axes.loglog(curve.sizes, curve.milliseconds, marker="o", markersize=3, label=label)
    low, high = axes.get_ylim()
    sizes = curves[0].sizes
    middle, ratio = math.sqrt(low * high), math.sqrt(sizes[-1] / sizes[0])
    line = (middle / ratio, middle * ratio)
    axes.loglog((sizes[0], sizes[-1]), line, color="#aaa", lw=1, ls="--", zorder=0)
    axes.set_ylim(low, high * 10 ** (0.09 * len(curves) * math.log10(high / low) + 0.1))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([sizes[0], sizes[len(sizes) // 2], sizes[-1]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda taken, _: f"{taken:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, default=RESULTS / "growth.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = measure(options.rounds, quick=options.quick)
    facts: dict[str, object] = {}
    for curve in curves:
        told = facts.setdefault(f"slope with {curve.of}", {})
        assert isinstance(told, dict)
        told[curve.name] = round(curve.slope, 2)
    print_facts(facts)
    steep = [f"{c.of}, {c.name}" for c in curves if c.slope > (1.25 if c.linear else 0.5)]
    print(f"steeper than they should be: {'; '.join(steep) or 'none'}")
    plot(curves, options.plot)
    print(f"drawn in {options.plot}")
    if options.json:
        write_json("growth", [], facts)


if __name__ == "__main__":
    main()
