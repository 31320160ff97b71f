"""DOT: rows as a graph, and its picture where something can draw one.

The graph is always of the folded rows and capped, since Graphviz takes minutes for some thousands
of nodes. Node ids are generated: a name as an id would turn its colons into ports. Graphviz may be
there as `pygraphviz`, which brings its own, or as the `dot` program; where neither is, the HTML
table is shown with a line that says so, and the DOT text is there all the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
from typing import Any

from patchlab.render.rows import Row, Table, Tone
from patchlab.render.text import printable

MAX_DOT_NODES = 300
HINT = (
    "No picture: Graphviz is not installed. `pip install pygraphviz` brings it along; "
    "`.to_dot()` gives the graph as text."
)
# Fixed and light, since a picture does not take the colors around it: dark text on a light box
# reads on any ground.
_FILLS: dict[Tone, tuple[str, str]] = {
    "plain": ("#ffffff", "#8a8f98"),
    "dim": ("#f3f4f6", "#b6bac2"),
    "match": ("#dbe7ff", "#2563eb"),
    "ok": ("#dcf5e4", "#168c46"),
    "warning": ("#fcefd5", "#be6e00"),
    "error": ("#fde0e0", "#dc2626"),
    "struck": ("#fde0e0", "#dc2626"),
}


def table_dot(table: Table, *, max_nodes: int = MAX_DOT_NODES) -> str:
    """Write the rows of a tree as a graph in the DOT language, from left to right.

    Args:
        table: Its rows are the nodes.
        max_nodes: Rows to draw; what is left out is counted in a last node.
    """
    lines = [
        "digraph {",
        '  graph [rankdir="LR", bgcolor="transparent", nodesep="0.12", ranksep="0.3"]',
        '  node [shape="box", style="filled,rounded", height="0.3", margin="0.12,0.05",'
        ' fontname="Helvetica,Arial,sans-serif", fontsize="10", fontcolor="#1f2328"]',
        '  edge [arrowhead="none", color="#8a8f98"]',
    ]
    above: list[int] = []
    for place, row in enumerate(table.rows[:max_nodes]):
        del above[row.depth :]
        lines.append(f"  n{place} {_node(row)}")
        if above:
            lines.append(f"  n{above[-1]} -> n{place}")
        above.append(place)
    left_out = len(table.rows) - max_nodes
    if left_out > 0:
        text = f"{left_out:,} more rows are not drawn"
        lines.append(f'  more [label={_quoted(text)}, shape="plaintext", style=""]')
    return "\n".join([*lines, "}", ""])


def dot_svg(dot: str) -> str | None:
    """Draw a graph as SVG with whatever Graphviz is there; None if there is none, or it fails."""
    for draw in (_draw_with_pygraphviz, _draw_with_program):
        svg = draw(dot)
        if svg is not None:
            # Neither the XML declaration nor the document type belongs into a page.
            return svg[svg.index("<svg") :] if "<svg" in svg else None
    return None


def graphviz_source(dot: str, fallback: str = "") -> Any:
    """Return a graph as a `graphviz.Source` that shows itself in a notebook with or without `dot`.

    Args:
        dot: The graph in the DOT language.
        fallback: HTML to show, below a hint, where no picture can be drawn.
    """
    return _source_class()(dot, fallback)


@functools.cache
def _source_class() -> Any:
    import graphviz  # Here, so that trees can be shown as text and HTML without it.

    class Picture(graphviz.Source):  # type: ignore[misc]
        """A graph that never raises for want of the `dot` program when a notebook shows it."""

        def __init__(self, source: str, fallback: str = "") -> None:
            super().__init__(source)
            self._fallback = fallback

        def _repr_mimebundle_(
            self, include: Any = None, exclude: Any = None, **_: Any
        ) -> dict[str, str]:
            svg = dot_svg(self.source)
            if svg is not None:
                return {"image/svg+xml": svg, "text/plain": self.source}
            return {
                "text/html": f"<div>{HINT}</div>{self._fallback}",
                "text/plain": f"{HINT}\n{self.source}",
            }

    return Picture


def _draw_with_pygraphviz(dot: str) -> str | None:
    if importlib.util.find_spec("pygraphviz") is None:
        return None
    try:
        pygraphviz: Any = importlib.import_module("pygraphviz")
        drawn: bytes = pygraphviz.AGraph(string=dot).draw(format="svg", prog="dot")
    except (ImportError, OSError, ValueError, RuntimeError):
        # A pygraphviz built for another Graphviz fails at import or when it draws; the program
        # may still be there.
        return None
    return drawn.decode("utf-8")


def _draw_with_program(dot: str) -> str | None:
    if shutil.which("dot") is None:
        return None
    import graphviz

    try:
        drawn: str = graphviz.Source(dot).pipe(format="svg", encoding="utf-8")
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError, OSError):
        return None
    return drawn


def _node(row: Row) -> str:
    fill, line = _FILLS[row.tone]
    times = f" × {row.fold:,}" if row.fold > 1 else ""
    mark = f"{row.mark} " if row.mark else ""
    first = f"{mark}{row.label}{times}"
    second = " · ".join(part for part in (*row.cells, row.note) if part)
    label = _quoted(first) if not second else _quoted(first)[:-1] + "\\n" + _quoted(second)[1:]
    parts = [f"label={label}", f'fillcolor="{fill}"', f'color="{line}"']
    if row.title:
        parts.append(f"tooltip={_quoted(row.title)}")
    return f"[{', '.join(parts)}]"


def _quoted(text: str) -> str:
    """Write a text as a quoted DOT string: never HTML, and a backslash is a backslash."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
