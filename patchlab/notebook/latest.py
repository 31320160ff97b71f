"""The newest of the jobs that typing asks for, run beside the kernel's event loop.

While somebody types, each letter asks for work that the next letter makes worthless. So a job waits
a moment first, only the newest one runs, in a thread of its own, one at a time; what it finds is
handed over on the loop, where widgets may be changed, and dropped if something newer was asked for
meanwhile. A thread starts outside of every scope and prints nothing.

Where no event loop runs, as in a script or a test, a job is done at once, where it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tell = Callable[[Any], None]
Work = Callable[[Tell], None]


@dataclass(frozen=True)
class _Job:
    number: int
    work: Work
    loop: asyncio.AbstractEventLoop


class Latest:
    """Runs the newest job.

    Args:
        deliver: Called on the loop with each result of the newest job.
        fail: Called on the loop with the exception that ended it.
        progress: Called on the loop with the seconds that the newest job has run, first when it
            takes longer than `patience`; with None when it has ended.
        delay: Seconds without a newer job before one starts.
        patience: Seconds before progress is told.
    """

    def __init__(
        self,
        deliver: Callable[[Any], None],
        fail: Callable[[Exception], None],
        progress: Callable[[int | None], None],
        *,
        delay: float = 0.2,
        patience: float = 0.5,
    ) -> None:
        self._deliver, self._fail, self._progress = deliver, fail, progress
        self._delay, self._patience = delay, patience
        self._newest = 0
        self._waiting: _Job | None = None
        self._running: _Job | None = None
        self._due = False
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def busy(self) -> bool:
        """Whether the newest job has still to be done."""
        return self._waiting is not None or (
            self._running is not None and self._running.number == self._newest
        )

    def ask(self, work: Work) -> None:
        """Have a job done in place of all that were asked for before.

        Args:
            work: Called with a function that hands over a result; it may do so several times.
        """
        self._newest += 1
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._do_here(work)
            return
        self._waiting, self._due = _Job(self._newest, work, loop), False
        self._stop_timers()
        self._timers = [loop.call_later(self._delay, self._start)]

    def cancel(self) -> None:
        """Drop the newest job; one that runs goes on in its thread, and nobody hears of it."""
        self._newest += 1
        self._waiting, self._due = None, False
        self._stop_timers()
        self._progress(None)

    def _do_here(self, work: Work) -> None:
        try:
            work(self._deliver)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown in the form
            self._fail(error)

    def _start(self) -> None:
        self._stop_timers()
        job = self._waiting
        if job is None:
            return
        self._timers = [job.loop.call_later(self._patience, self._tick, job, job.loop.time())]
        if self._running is not None:
            self._due = True  # It begins when the running one ends.
            return
        self._waiting, self._running, self._due = None, job, False
        threading.Thread(target=_run, args=(self, job), name="patchlab", daemon=True).start()

    def _tick(self, job: _Job, since: float) -> None:
        if job.number == self._newest:
            self._progress(int(job.loop.time() - since))
            self._timers = [job.loop.call_later(1, self._tick, job, since)]

    def _told(self, job: _Job, result: Any) -> None:
        if job.number == self._newest:
            self._deliver(result)

    def _failed(self, job: _Job, error: Exception) -> None:
        if job.number == self._newest:
            self._fail(error)

    def _ended(self, job: _Job) -> None:
        self._running = None
        if job.number == self._newest:
            self._stop_timers()
            self._progress(None)
        elif self._due:
            self._start()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []


def _run(latest: Latest, job: _Job) -> None:
    """Do a job; the body of the thread."""

    def on_loop(function: Callable[..., None], *args: Any) -> None:
        # A loop that is closed belongs to a kernel that is going away.
        with contextlib.suppress(RuntimeError):
            job.loop.call_soon_threadsafe(function, *args)

    try:
        job.work(lambda result: on_loop(latest._told, job, result))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is shown in the form
        on_loop(latest._failed, job, error)
    finally:
        on_loop(latest._ended, job)
