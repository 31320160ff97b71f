"""Ranks as child processes: they end with their parent, and with each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchlab.ship.children import ENDED, run_ranks

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, pathlib, sys, time
from patchlab.ship.children import leave_with_parent
leave_with_parent()
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
(folder / f"pid{rank}").write_text(str(os.getpid()))
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
if what == "fail" and rank == "1":
    sys.exit(3)
if what in ("fail", "sleep"):
    time.sleep(600)
"""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    (tmp_path / "rank_of_test.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(what, timeout=60):
        return run_ranks(
            "rank_of_test", [str(tmp_path), what], ranks=2, folder=tmp_path, timeout=timeout
        )

    return run


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and that nobody has waited for is still listed.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_ranks_know_their_place_and_what_they_print_is_kept(ranks):
    ended = ranks("end")

    assert [(end.rank, end.status, end.output, end.timed_out) for end in ended] == [
        (0, 0, "rank 0 of 2\n", False),
        (1, 0, "rank 1 of 2\n", False),
    ]


def test_rank_that_fails_ends_the_others(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("patchlab.ship.children._GRACE", 0.2)

    ended = ranks("fail")

    assert ended[1].status == 3
    assert ended[0].status in (ENDED, -signal.SIGKILL)
    assert not any(end.timed_out for end in ended)


def test_ranks_are_ended_when_the_time_is_over(ranks, tmp_path):
    ended = ranks("sleep", timeout=2)

    assert all(end.timed_out for end in ended)
    assert {end.status for end in ended} <= {ENDED, -signal.SIGKILL}
    assert not any(is_alive(int(path.read_text())) for path in tmp_path.glob("pid*"))


def test_no_rank_outlives_a_parent_that_is_killed(ranks, tmp_path):
    code = (
        "import sys, pathlib; from patchlab.ship.children import run_ranks; "
        "folder = pathlib.Path(sys.argv[1]); "
        "run_ranks('rank_of_test', [str(folder), 'sleep'], ranks=2, folder=folder, timeout=600)"
    )
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": paths}
    )
    try:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        assert wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        assert all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()

    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))
