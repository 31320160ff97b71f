"""A short day in one kernel: nothing that anybody makes is kept, and nothing is left behind.

`./dev bench soak --long` is the long one. Here nothing is timed.
"""

from __future__ import annotations

import sys

import pytest

import patchlab
from benchmarks.soaking import Soak, objects_by_type, open_soak

# What IPython notes of each cell, and what the test runner itself makes.
OTHERS = ("IPython.", "_pytest.", "pytest", "builtins.", "hypothesis")


@pytest.fixture
def day():
    kept = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    with open_soak(seed=4) as soak:
        yield soak
    sys.displayhook, sys.excepthook, sys.modules["__main__"] = kept


def test_day_of_scopes_errors_threads_cells_and_widgets_leaves_nothing(day):
    day.run(100)  # Caches fill.
    for once in (day.widgets, day.panels, day.cells, day.routing, day.shown_routing, day.looked_at):
        once()
    day.still_alive()
    before = objects_by_type()

    day.run(200)
    day.panels()

    assert day.still_alive() == []
    assert day.problems == []
    grown = {
        name: number - before[name]
        for name, number in objects_by_type().items()
        if number - before[name] > 20 and not name.startswith(OTHERS)
    }
    assert grown == {}
    status = patchlab.status()
    assert not status.leaks
    assert not status.open_scopes
    assert not status.entries
    # Each kind of thing was done, or the above would say little.
    assert {name for name, count in day.counts.items() if count} >= {
        "scope",
        "failing_scope",
        "registered",
        "threads",
        "swapped",
    }


def test_what_is_kept_is_found():
    """Guards the test above."""
    soak = Soak()
    model = soak.build()
    soak.replacement()

    assert soak.still_alive() == [model]
