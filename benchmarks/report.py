"""What all benchmarks share: runs side by side, medians of ratios, a table, a JSON file.

Seconds depend on the machine and on what else it does; ratios between two things done in turns do
so far less. The noise of a run is printed with it: how far the baseline was from its own median.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measured:
    """One thing measured against a baseline.

    Attributes:
        case: What it was measured on.
        name: What was measured.
        ratio: Median over the rounds of its time divided by the baseline's in the same round.
        milliseconds: Its own median.
        noise: Median deviation of the baseline from its median, as a share.
        target: The ratio to hold, None if there is none.
    """

    case: str
    name: str
    ratio: float
    milliseconds: float
    noise: float
    target: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the target is held, or there is none."""
        return self.target is None or self.ratio <= self.target


def compare(
    case: str,
    baseline: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    targets: Mapping[str, float] | None = None,
) -> list[Measured]:
    """Run the baseline and the others in turns, after one round that is not counted."""
    runs = {"baseline": baseline, **others}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for count in range(rounds + 1):
        gc.collect()
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
            if count:
                seconds[name].append(taken)
    base = seconds["baseline"]
    middle = statistics.median(base)
    noise = statistics.median(abs(value - middle) for value in base) / middle
    return [
        Measured(
            case=case,
            name=name,
            ratio=statistics.median(a / b for a, b in zip(seconds[name], base, strict=True)),
            milliseconds=1e3 * statistics.median(seconds[name]),
            noise=noise,
            target=(targets or {}).get(name),
        )
        for name in runs
    ]


def print_table(results: list[Measured]) -> None:
    """Print the results as an aligned table."""
    rows = [("case", "what", "ratio", "ms", "noise", "target")]
    for result in results:
        target = ""
        if result.target is not None:
            target = f"<= {result.target:g}  {'holds' if result.holds else 'MISSED'}"
        rows.append(
            (
                result.case,
                result.name,
                f"{result.ratio:.2f}",
                f"{result.milliseconds:.2f}",
                f"{result.noise:.0%}",
                target,
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if place in (2, 3, 4) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_facts(facts: Mapping[str, object], indent: str = "") -> None:
    """Print what is no ratio: a line for each figure, those that belong together indented."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            print(f"{indent}{name}")
            print_facts(value, indent + "  ")
        elif isinstance(value, list):
            for number, each in enumerate(value, 1):
                print_facts({f"{name}, {number} of {len(value)}": each}, indent)
        else:
            shown = f"{value:,.4g}" if isinstance(value, float) else value
            print(f"{indent}{name}: {shown}")


def write_json(name: str, results: list[Measured], facts: Mapping[str, object]) -> Path:
    """Write results, facts and versions to `benchmarks/results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "machine": {"python": platform.python_version(), "system": platform.system()},
        "versions": {name: _version(name) for name in ("torch", "transformers", "patchlab")},
        "facts": dict(facts),
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
