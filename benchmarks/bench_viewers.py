"""What other tree viewers hand to the browser for the same tree: bytes, and seconds in Python.

    python -m benchmarks.bench_viewers [modules ...] [--json]

treescope writes its whole tree as HTML; ipytree makes a widget of each module, and its state is
what goes over the wire; nnsight shows text. All are built for the sizes given (1,200 by default:
treescope takes minutes for 50,000). patchlab's own figures in the browser are in `bench_widget`.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable

import torch
from torch import nn

import patchlab
from benchmarks.report import Measured, print_facts, print_table, write_json
from benchmarks.synthetic import synthetic_model
from patchlab.notebook.tree_widget import TreeWidget


def patchlab_bytes(model: nn.Module) -> bytes:
    """Make the widget and return the columns that it sends."""
    return bytes(TreeWidget(patchlab.module_tree(model)).payload)


def treescope_bytes(model: nn.Module) -> bytes:
    """Return treescope's HTML."""
    import treescope

    html: str = treescope.render_to_html(model)
    return html.encode()


def ipytree_bytes(model: nn.Module) -> bytes:
    """Make ipytree's widgets and return the state of all of them."""
    import ipytree

    nodes = {"": ipytree.Node(type(model).__name__)}
    for fqn, module in model.named_modules():
        if fqn:
            parent, _, name = fqn.rpartition(".")
            nodes[fqn] = ipytree.Node(f"{name}: {type(module).__name__}")
            nodes[parent].add_node(nodes[fqn])
    tree = ipytree.Tree([nodes[""]])
    states = [widget.get_state() for widget in (tree, *nodes.values())]
    return json.dumps(states, default=str).encode()


def nnsight_bytes(model: nn.Module) -> bytes:
    """Return the text that nnsight shows of a model it has wrapped."""
    import nnsight

    return repr(nnsight.NNsight(model)).encode()


VIEWERS: dict[str, Callable[[nn.Module], bytes]] = {
    "patchlab": patchlab_bytes,
    "treescope": treescope_bytes,
    "ipytree": ipytree_bytes,
    "nnsight": nnsight_bytes,
}


def measure(size: int) -> tuple[list[Measured], dict[str, object]]:
    """Measure each viewer at one size against `str(model)`."""
    with torch.device("meta"):
        model, tiny = synthetic_model(size), nn.Sequential(nn.Linear(1, 1))
    case = f"{size:,} modules, sent"
    start = time.perf_counter()
    str(model)
    printed = time.perf_counter() - start
    results, sent = [Measured(case, "print", 1.0, 1e3 * printed, 0.0)], {}
    for name, viewer in VIEWERS.items():
        try:
            viewer(tiny)  # what is imported at first use is not timed
        except ImportError:
            print(f"{name} is not installed, left out")
            continue
        start = time.perf_counter()
        content = viewer(model)
        taken = time.perf_counter() - start
        results.append(Measured(case, name, taken / printed, 1e3 * taken, 0.0))
        sent[name] = (
            f"{len(content) / 1e3:,.1f} kB, {len(zlib.compress(content)) / 1e3:,.1f} packed"
        )
    return results, {case: sent}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", type=int, nargs="*", default=[1_200])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: list[Measured] = []
    facts: dict[str, object] = {}
    for size in options.modules:
        measured, told = measure(size)
        results += measured
        facts |= told
    print_table(results)
    print_facts(facts)
    if options.json:
        write_json("viewers", results, facts)


if __name__ == "__main__":
    main()
