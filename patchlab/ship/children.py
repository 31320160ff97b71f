"""Child processes as the ranks of a small distributed run, none of which outlives its parent.

The ranks meet in a file and not at a port, so two runs never get into each other's way. A child
reads its standard input to the end and leaves then: however the parent ends, that is when it is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ENDED = 70
_GRACE = 8.0
_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Ended:
    """How one child ended.

    Attributes:
        rank: Its rank.
        status: Its exit status; negative for a signal, `ENDED` or a signal if it was ended.
        output: The end of what it wrote to standard output and error.
        timed_out: Whether it was ended because the time was over.
    """

    rank: int
    status: int
    output: str
    timed_out: bool


def run_ranks(
    module: str, arguments: Sequence[str], *, ranks: int, folder: Path, timeout: float
) -> tuple[Ended, ...]:
    """Run a Python module once for each rank, on the CPU, and wait for all of them.

    If one fails, the others have a few seconds to say why they do, and are ended then.

    Args:
        module: Its name; it has to call `leave_with_parent` first of all.
        arguments: What each of them is given.
        ranks: How many there are.
        folder: Where their output is kept.
        timeout: Seconds until all of them are ended.
    """
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            log = stack.enter_context((folder / f"rank{rank}.log").open("wb"))
            child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(rank, ranks),
            )
            stack.callback(_end, child)
            children.append(child)
        late = _wait(children, timeout)
    return tuple(
        Ended(
            rank,
            child.returncode,
            (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")[-_TAIL:],
            late,
        )
        for rank, child in enumerate(children)
    )


def leave_with_parent() -> None:
    """End this process as soon as the parent closes its standard input, or is gone."""

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os._exit(ENDED)

    threading.Thread(target=watch, daemon=True).start()


def _environment(rank: int, ranks: int) -> dict[str, str]:
    dropped = ("TORCHELASTIC", "PATCHLAB", "ACCELERATE", "GROUP_", "ROLE_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # What a parent can import a child can: patchlab itself, and what patch files import.
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return env | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }


def _wait(children: list[subprocess.Popen[bytes]], timeout: float) -> bool:
    """Wait until all are done, one has failed and the grace is over, or the time is; True then."""
    end = time.monotonic() + timeout
    failed = False
    # All are asked each time: a child that nobody asks has no exit status yet.
    while None in (statuses := [child.poll() for child in children]):
        now = time.monotonic()
        if not failed and any(statuses):
            failed, end = True, min(end, now + _GRACE)
        if now > end:
            return not failed
        time.sleep(0.05)
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if child.stdin is not None:
            child.stdin.close()
    if child.poll() is None:
        child.kill()
    child.wait()
