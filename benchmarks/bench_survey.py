"""What the catalog and a survey cost, against importing everything and asking transformers.

    python -m benchmarks.bench_survey [--rounds 3] [--json]

Each measurement has a process of its own, so that nothing is warm that a user would find cold. A
round runs all of them in turns; the first catalog of each round is read from the source.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.report import Measured, print_table, write_json

KEY = ".*Attention"

# Each prints a JSON object with "seconds" and what it found.
MEASUREMENTS = {
    "catalog, first time": """
import time
from patchlab.model.catalog import load_catalog
start = time.perf_counter()
catalog = load_catalog(progress=False)
result = {"seconds": time.perf_counter() - start, "found": f"{len(catalog):,} classes"}
""",
    "catalog, cached": """
import time
from patchlab.model.catalog import load_catalog
start = time.perf_counter()
catalog = load_catalog(progress=False)
result = {"seconds": time.perf_counter() - start, "found": f"{len(catalog):,} classes"}
""",
    "survey, cached, first in a process": """
import time
from patchlab.plan.survey import survey
start = time.perf_counter()
found = survey(KEY, progress=False)
found.to_text()
seconds = time.perf_counter() - start
result = {
    "seconds": seconds, "found": f"{len(found.rows)} classes, {len(found.containers)} containers"
}
""",
    "survey, again": """
import time
from patchlab.plan.survey import survey
survey(KEY, progress=False)
start = time.perf_counter()
found = survey(KEY, progress=False)
found.to_text()
seconds = time.perf_counter() - start
result = {
    "seconds": seconds, "found": f"{len(found.rows)} classes, {len(found.containers)} containers"
}
""",
    "a narrower key for each model type": """
import time
from patchlab.plan.survey import survey
found = survey(KEY, progress=False)
start = time.perf_counter()
suggestions = found.suggestions(KEY)
seconds = time.perf_counter() - start
result = {"seconds": seconds, "found": f"{len(suggestions)} keys"}
""",
    "import everything, ask transformers' matcher": """
import importlib, sys, time, warnings
from pathlib import Path
from torch import nn
import transformers
from transformers import monkey_patching
warnings.simplefilter("ignore")
start = time.perf_counter()
root = Path(transformers.__file__).parent / "models"
refused = 0
for path in sorted(root.glob("*/modeling_*.py")):
    try:
        importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    except ImportError:  # an optional package that is not installed
        refused += 1
names = set()
for name, python_module in list(sys.modules.items()):
    if name.startswith("transformers.models."):
        for attribute, value in list(vars(python_module).items()):
            if isinstance(value, type) and issubclass(value, nn.Module):
                if monkey_patching._find_replacement_class(attribute, {KEY: nn.Identity}):
                    names.add((value.__module__, attribute))
seconds = time.perf_counter() - start
result = {"seconds": seconds, "found": f"{len(names)} classes, {refused} files not importable"}
""",
}


def measure(code: str, environment: dict[str, str]) -> dict[str, object]:
    """Run one measurement in a fresh process."""
    script = f"KEY = {KEY!r}\n{code}\nimport json\nprint(json.dumps(result))"
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(ran.stdout.splitlines()[-1]))


BASELINE = "import everything, ask transformers' matcher"
# Shares of the baseline, in one run.
TARGETS = {
    "catalog, first time": 1.5,
    "catalog, cached": 0.02,
    "survey, cached, first in a process": 0.05,
    "survey, again": 0.01,
}


def main() -> None:
    """Measure, print seconds and ratios, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/survey.json")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in MEASUREMENTS}
    found: dict[str, object] = {}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PATCHLAB_CACHE": folder, "HF_HUB_OFFLINE": "1"}
            for name, code in MEASUREMENTS.items():
                result = measure(code, environment)
                seconds[name].append(float(str(result["seconds"])))
                found[name] = result["found"]
    base = seconds[BASELINE]
    middle = statistics.median(base)
    noise = statistics.median(abs(value - middle) for value in base) / middle
    results = [
        Measured(
            case=KEY,
            name=name,
            ratio=statistics.median(a / b for a, b in zip(taken, base, strict=True)),
            milliseconds=1e3 * statistics.median(taken),
            noise=noise,
            target=TARGETS.get(name),
        )
        for name, taken in seconds.items()
    ]
    for name, what in found.items():
        print(f"{name}: {what}")
    print_table(results)
    if arguments.json:
        print(f"written to {write_json('survey', results, found)}")


if __name__ == "__main__":
    main()
