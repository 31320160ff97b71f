"""Comparing outputs: do two models agree, module by module, and what do they cost.

Both models run on the same inputs, with the same random numbers and without gradients. Each module
that both have is compared at each of its calls, in the order in which calls end, so the first that
differs is the innermost and earliest: where to look. Then both run once more without hooks for
their time, and once for their memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from patchlab.errors import TargetError
from patchlab.mapping.rules import brief
from patchlab.render.frames import frame_of
from patchlab.render.rows import Column, Row, Table, Tone
from patchlab.render.shown import Shown
from patchlab.render.text import MAX_TEXT_ROWS
from patchlab.verify.output_runs import Difference, Run, compare_run, cost_of, record_run

Status = Literal["same", "differs", "other shape", "only before", "only after"]


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One module of either model.

    Attributes:
        fqn: Its path, "" for the model itself.
        before_class: Its class in the first model, None if it was not called there.
        after_class: Its class in the second model, None if it was not called there.
        before_calls: How often it was called in the first model.
        after_calls: How often it was called in the second model.
        status: "same" within the tolerance of its dtype.
        max_abs: The largest difference of two elements, over all calls; None if not compared.
        max_rel: That, divided by the largest element of the first model's output.
        before_seconds: Time in it and below it, hooks included.
        after_seconds: The same in the second model.
    """

    fqn: str
    before_class: str | None
    after_class: str | None
    before_calls: int
    after_calls: int
    status: Status
    max_abs: float | None
    max_rel: float | None
    before_seconds: float
    after_seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class OutputComparison(Shown):
    """How the outputs of two models compare; made by `compare_outputs`.

    Attributes:
        rows: Every module that was called, in execution order; the model itself is the last.
        before_seconds: Time of a forward of the first model, without hooks.
        after_seconds: The same of the second model.
        before_bytes: Peak memory of a forward of the first model beside its parameters: what the
            allocator says on an accelerator, else the tensors alive at once.
        after_bytes: The same of the second model.
    """

    rows: tuple[OutputRow, ...]
    before_seconds: float
    after_seconds: float
    before_bytes: int
    after_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the outputs of the models agree within the tolerance of their dtype."""
        return self.rows[-1].status == "same"

    @property
    def first_divergence(self) -> OutputRow | None:
        """The first module in execution order whose output differs, None if none does."""
        return next((r for r in self.rows if r.status in ("differs", "other shape")), None)

    @property
    def max_abs(self) -> float | None:
        """The largest difference of the models' own outputs."""
        return self.rows[-1].max_abs

    @property
    def verdict(self) -> str:
        """The result in a line."""
        root, first = self.rows[-1], self.first_divergence
        if root.status == "other shape":
            told = "the outputs have other shapes"
        else:
            told = "the outputs agree" if self.ok else "the outputs DIFFER"
            told += f" (max {_number(root.max_abs)}, relative {_number(root.max_rel)})"
        where = f" · first divergence: {first.fqn or 'the model itself'}" if first else ""
        return (
            f"{told}{where} · {_seconds(self.before_seconds)} → {_seconds(self.after_seconds)} · "
            f"{_size(self.before_bytes)} → {_size(self.after_bytes)}"
        )

    def to_text(self, *, width: int = 200, max_rows: int = MAX_TEXT_ROWS, **options: Any) -> str:
        """Return the table as text, wide enough for whole FQNs, since cut ones look the same."""
        return super().to_text(width=width, max_rows=max_rows, **options)

    def to_table(self) -> Table:
        """Return a row for each module, in execution order."""
        first = self.first_divergence
        rows = []
        for row in self.rows:
            tone: Tone = "plain" if row.status == "same" else "dim"
            note: str = "" if row.status == "same" else row.status
            if row.status in ("differs", "other shape"):
                tone = "error"
                note = "first divergence" if row is first else row.status
            cells = (
                _classes(row),
                str(row.before_calls)
                if row.before_calls == row.after_calls
                else f"{row.before_calls} → {row.after_calls}",
                _number(row.max_abs),
                _number(row.max_rel),
                _seconds(row.before_seconds),
                _seconds(row.after_seconds),
            )
            mark = "✕" if tone == "error" else ""
            rows.append(Row(0, row.fqn or "(the model)", cells, tone, mark=mark, note=note))
        columns = (
            Column("Module", mono=True),
            Column("Class", mono=True),
            Column("Calls", "right"),
            Column("Max diff", "right"),
            Column("Relative", "right"),
            Column("Before", "right"),
            Column("After", "right"),
        )
        caption: Tone = "ok" if self.ok else "error"
        return Table(columns, tuple(rows), self.verdict, caption, note_title="State")

    def to_frame(self) -> Any:
        """Return a pandas frame with one row for every module, in execution order."""
        names = [field for field in OutputRow.__dataclass_fields__]
        return frame_of({name: [getattr(row, name) for row in self.rows] for name in names})

    def to_plot(self) -> Any:
        """Return a `matplotlib.figure.Figure`: relative difference over execution order.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        compared = [row for row in self.rows if row.max_rel is not None]
        floor = min((r.max_rel for r in compared if r.max_rel), default=1e-12) / 10
        heights = [min(max(row.max_rel or 0.0, floor), 1e12) for row in compared]
        colors = ["tab:blue" if row.status == "same" else "tab:red" for row in compared]
        figure = Figure(figsize=(min(5 + len(compared) * 0.1, 14), 4), layout="constrained")
        axes = figure.add_subplot()
        axes.bar(range(len(compared)), heights, color=colors, bottom=0)
        axes.set_yscale("log")
        axes.set_xlabel("modules, in execution order")
        axes.set_ylabel("relative difference")
        step = max(1, len(compared) // 30)
        labels = [row.fqn or "(the model)" for row in compared][::step]
        axes.set_xticks(range(0, len(compared), step), labels=labels, rotation=90, fontsize="small")
        axes.set_title(self.verdict, fontsize="medium", loc="left", parse_math=False, wrap=True)
        return figure


def compare_outputs(before: nn.Module, after: nn.Module, inputs: Any) -> OutputComparison:
    """Run two models on the same inputs and compare them module by module.

    Modules are told apart by FQN, so those that a replacement has and the original has not are
    shown and not compared. Both models run in the mode (training or not) that they are in. The
    outputs of the first are held in memory until the second has run.

    Args:
        before: The model to compare with.
        after: The model that is compared, of the same FQNs where modules correspond.
        inputs: A dict of keyword arguments, a tuple of positional ones, or one tensor. They are
            copied for each run, and moved to where each model is.

    Returns:
        A comparison with `.ok`, `.first_divergence`, `.rows`.

    Raises:
        TargetError: One is no model, the inputs are none of these, or a forward raised.

    Example:
        >>> import torch, patchlab
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> patchlab.compare_outputs(model, model, torch.ones(2, 4)).ok
        True
    """
    for model in (before, after):
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"compare_outputs takes two models, got {brief(model)}. Give the "
                f"models themselves; to compare trees use patchlab.diff_trees."
            )
    recorded = record_run(before, inputs)
    compared, differences = compare_run(after, inputs, recorded)
    before_seconds, before_bytes = cost_of(before, inputs)
    after_seconds, after_bytes = cost_of(after, inputs)
    return OutputComparison(
        _rows(recorded, compared, differences),
        before_seconds,
        after_seconds,
        before_bytes,
        after_bytes,
    )


def _rows(before: Run, after: Run, differences: dict[str, Difference]) -> tuple[OutputRow, ...]:
    order = list(after.calls)
    # Modules that only the first model called keep their place before what followed them.
    following = list(before.calls)
    for place, fqn in enumerate(following):
        if fqn not in after.calls:
            later = next((other for other in following[place:] if other in after.calls), None)
            order.insert(len(order) if later is None else order.index(later), fqn)
    rows = []
    for fqn in order:
        difference = differences.get(fqn)
        status: Status
        if fqn not in after.calls:
            status = "only before"
        elif fqn not in before.calls:
            status = "only after"
        elif difference is None or difference.ok:
            status = "same"
        else:
            status = "differs" if difference.comparable else "other shape"
        known = difference is not None and difference.comparable
        rows.append(
            OutputRow(
                fqn,
                before.classes.get(fqn),
                after.classes.get(fqn),
                before.calls.get(fqn, 0),
                after.calls.get(fqn, 0),
                status,
                difference.max_abs if known and difference else None,
                difference.max_rel if known and difference else None,
                before.seconds.get(fqn, 0.0),
                after.seconds.get(fqn, 0.0),
            )
        )
    return tuple(rows)


def _classes(row: OutputRow) -> str:
    if row.before_class == row.after_class:
        return row.before_class or ""
    return f"{row.before_class or '–'} → {row.after_class or '–'}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.2g}"


def _seconds(value: float) -> str:
    if not value:
        return "–"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if math.isfinite(count) else "–"
        count = count / 1000  # type: ignore[assignment]
    return ""
