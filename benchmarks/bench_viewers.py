"""What other tree viewers hand to the browser for the same tree: bytes, and seconds in Python.

    python -m benchmarks.bench_viewers [modules ...]

treescope writes its whole tree as HTML; ipytree makes a widget of each module, and its state is
what goes over the wire. Both are built for the sizes given (1,200 by default: treescope takes
minutes for 50,000). patchlab's own figures in the browser are in `bench_widget`.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable

import torch
from torch import nn

import patchlab
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


VIEWERS: dict[str, Callable[[nn.Module], bytes]] = {
    "patchlab": patchlab_bytes,
    "treescope": treescope_bytes,
    "ipytree": ipytree_bytes,
}


def main() -> None:
    """Measure each viewer at each size and print a line for it."""
    for size in [int(size) for size in sys.argv[1:]] or [1_200]:
        with torch.device("meta"):
            model = synthetic_model(size)
        start = time.perf_counter()
        str(model)
        printed = time.perf_counter() - start
        print(f"{size:,} modules; str(model) takes {1e3 * printed:.1f} ms")
        for name, measure in VIEWERS.items():
            start = time.perf_counter()
            try:
                sent = measure(model)
            except ImportError:
                print(f"  {name:10} is not installed, left out")
                continue
            taken = time.perf_counter() - start
            small = len(zlib.compress(sent))
            print(
                f"  {name:10} {taken / printed:8.1f} x print   {len(sent) / 1e3:10,.1f} kB"
                f"   {small / 1e3:8,.1f} kB compressed"
            )


if __name__ == "__main__":
    main()
