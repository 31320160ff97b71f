"""Plots: matrices as matplotlib figures, for scripts and papers.

matplotlib is imported when a figure is asked for, and its global state is left alone: no current
figure, no backend chosen, no style.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def heatmap(
    values: Sequence[Sequence[float]],
    *,
    row_labels: Sequence[str],
    row_title: str,
    column_title: str,
    value_title: str,
    title: str = "",
    center: float | None = None,
) -> Any:
    """Return a `matplotlib.figure.Figure` of a matrix, rows downward.

    Args:
        values: Rows, which may differ in length; what is missing stays blank.
        row_labels: One for each row, written as often as there is room.
        row_title: What rows are.
        column_title: What columns are.
        value_title: What the color says.
        title: Above the matrix, as plain text.
        center: The value that gets the neutral color; colors then part to both sides of it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # `Figure` and not `pyplot`: pyplot keeps every figure it makes, and a notebook would show it
    # a second time.
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    width = max((len(row) for row in values), default=0)
    filled = [[*row, *[float("nan")] * (width - len(row))] for row in values]
    largest = max((value for row in values for value in row), default=0.0)
    size = (min(5 + width * 0.12, 12), min(3 + len(values) * 0.22, 12))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    if center is None:
        image = axes.imshow(filled, aspect="auto", interpolation="nearest", cmap="viridis")
    else:
        norm = TwoSlopeNorm(vmin=0.0, vcenter=center, vmax=max(largest, center * 1.01))
        image = axes.imshow(
            filled, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm
        )
    step = max(1, len(row_labels) // 24)
    axes.set_yticks(range(0, len(row_labels), step), labels=row_labels[::step])
    axes.set_ylabel(row_title)
    axes.set_xlabel(column_title)
    # parse_math: a title is text, and a "$" in it is a dollar.
    axes.set_title(title, fontsize="medium", loc="left", parse_math=False, wrap=True)
    figure.colorbar(image, ax=axes, label=value_title)
    return figure
