"""Fixtures for all tests; after each, nothing of a patch may be left in the process."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.leakguard import changed, process_state

# A loaded machine draws examples slowly; how fast it is says nothing about the code.
settings.register_profile("patchlab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patchlab")

STATE = pytest.StashKey[dict]()

# Scripts that a test hands to a type checker or runs: importing one would be running it.
collect_ignore_glob = ["data/*.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--all-architectures",
        action="store_true",
        help="build every architecture of the installed transformers, and not a sample of them",
    )


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """No class, `__init__`, registry key, conversion, recorder or hook is changed by a test.

    A test that makes a leak on purpose is marked `leaks` and mends it itself.
    """
    # What the last test left is what this one finds: looking at all classes once is enough.
    known = request.config.stash.setdefault(STATE, {})
    before = known.get("state") or process_state()
    yield
    known["state"] = after = process_state()
    again = tuple(prefix for mark in request.node.iter_markers("reloads") for prefix in mark.args)
    left = [line for line in changed(before, after) if not again or not line.startswith(again)]
    assert not left, "left behind:\n" + "\n".join(left[:20])
