"""One table of what benchmarks have measured, from the files that `--json` writes.

    python -m benchmarks.summary [name ...]

`./dev bench` ends with it. A ratio is a time divided by the baseline's in the same run; the noise
beside it says how far the baseline itself strayed. Nothing here fails: a target that is missed is
said, and is for a person to judge.
"""

from __future__ import annotations

import json
import sys

from benchmarks.report import RESULTS, Measured, print_facts, print_table


def main() -> None:
    """Print the table for the named benchmarks, for all that have a file if none is named."""
    names = sys.argv[1:] or sorted(path.stem for path in RESULTS.glob("*.json"))
    results: list[Measured] = []
    facts: dict[str, dict[str, object]] = {}
    for name in names:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            print(f"{name}: no figures were written")
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        results += [Measured(**result) for result in content["results"]]
        facts[name] = content["facts"]
    for name, told in facts.items():
        if told:
            print(f"\n{name}")
            print_facts(told, "  ")
    print()
    print_table(results)
    missed = [f"{r.case}, {r.name}" for r in results if not r.holds]
    print(f"\n{len(results)} ratios" + (f"; missed: {'; '.join(missed)}" if missed else ""))


if __name__ == "__main__":
    main()
