"""One kernel, one long day: does anything grow, leak or get slower?

    ./dev bench soak [--scopes 2000 | --long] [--seed 0] [--json]

Thousands of scopes among all else that a user does, at random (see `soaking`), `--long` 10,000 of
them. The first tenth warms up caches and is not counted. Of the rest the last tenth is compared to
the first: the time of a scope, the resident memory, and how many objects of each class there are.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter

import torch

import patchlab
from benchmarks.report import Measured, print_facts, print_table, write_json
from benchmarks.soaking import objects_by_type, open_soak, resident_bytes

LONG = 10_000


def soak(scopes: int, seed: int) -> tuple[list[Measured], dict[str, object]]:
    """Run, and return the time of scopes and what was found."""
    with open_soak(seed) as day:
        day.run(scopes // 10)
        day.still_alive()
        before, resident = objects_by_type(), resident_bytes()
        warm = len(day.seconds)
        day.run(scopes - scopes // 10)
        alive = day.still_alive()
        alive_names = Counter(type(made).__name__ for made in alive)
        del alive
        grown = objects_by_type()
        facts: dict[str, object] = {
            "scopes": scopes,
            "things done": dict(day.counts),
            "models and classes still alive": dict(alive_names),
            "problems": day.problems,
            "leaks by status()": len(patchlab.status().leaks),
            "resident memory grew by, MB": round((resident_bytes() - resident) / 1e6, 1),
            "objects that grew by more than 1 in 100 scopes": {
                name: number - before[name]
                for name, number in grown.most_common()
                if number - before[name] > max(scopes // 100, 10)
            },
        }
    times = day.seconds[warm:]
    tenth = max(len(times) // 10, 1)
    first, last = times[:tenth], times[-tenth:]
    middle = statistics.median(first)
    noise = statistics.median(abs(taken - middle) for taken in first) / middle
    return [
        Measured("time of a scope", "first tenth", 1.0, middle * 1e3, noise),
        Measured(
            "time of a scope",
            "last tenth",
            statistics.median(last) / middle,
            statistics.median(last) * 1e3,
            noise,
        ),
    ], facts


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scopes", type=int, default=2000)
    parser.add_argument("--long", action="store_true", help=f"{LONG:,} scopes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, facts = soak(LONG if options.long else max(options.scopes, 20), options.seed)
    print_table(results)
    print_facts(facts)
    if options.json:
        write_json("soak", results, facts)


if __name__ == "__main__":
    main()
