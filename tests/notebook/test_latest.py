"""The newest job runs beside the event loop; what older ones find is dropped."""

from __future__ import annotations

import asyncio
import threading

import pytest

from patchlab.notebook.latest import Latest


class Heard:
    """What a `Latest` has told."""

    def __init__(self, **options):
        self.results, self.errors, self.progress, self.threads = [], [], [], []
        self.latest = Latest(
            self._deliver, self.errors.append, self.progress.append, delay=0.01, **options
        )

    def _deliver(self, result):
        self.results.append(result)
        self.threads.append(threading.current_thread())

    async def until(self, condition):
        for _ in range(4000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not happen")


def test_only_the_newest_of_several_is_done():
    async def main():
        heard, done = Heard(), []
        for number in range(5):

            def work(tell, number=number):
                done.append(number)
                tell(number)

            heard.latest.ask(work)
        await heard.until(lambda: not heard.latest.busy)
        assert (done, heard.results) == ([4], [4])

    asyncio.run(main())


def test_job_runs_in_a_thread_and_is_told_on_the_loop():
    async def main():
        heard, threads = Heard(), []
        heard.latest.ask(lambda tell: (threads.append(threading.current_thread()), tell(1)))
        await heard.until(lambda: heard.results)
        assert threads != heard.threads == [threading.current_thread()]

    asyncio.run(main())


@pytest.mark.parametrize("pause", [0, 0.1])
def test_result_of_a_job_that_was_overtaken_is_dropped(pause):
    """Whether the old job ends before or after the new one would have begun."""

    async def main():
        heard, may_end, begun = Heard(), threading.Event(), threading.Event()

        def slow(tell):
            tell("early")
            begun.set()
            may_end.wait(20)
            tell("stale")

        heard.latest.ask(slow)
        await heard.until(begun.is_set)
        await heard.until(lambda: heard.results == ["early"])
        heard.latest.ask(lambda tell: tell("new"))
        await asyncio.sleep(pause)
        may_end.set()
        await heard.until(lambda: not heard.latest.busy)
        assert heard.results == ["early", "new"]

    asyncio.run(main())


def test_error_is_told_on_the_loop_and_the_next_job_runs():
    async def main():
        heard, error = Heard(), ValueError("no")

        def broken(tell):
            raise error

        heard.latest.ask(broken)
        await heard.until(lambda: heard.errors)
        heard.latest.ask(lambda tell: tell(2))
        await heard.until(lambda: heard.results)
        assert (heard.errors, heard.results) == ([error], [2])

    asyncio.run(main())


def test_slow_job_shows_progress_and_cancel_drops_it():
    async def main():
        heard, may_end, ended = Heard(patience=0.01), threading.Event(), threading.Event()

        def slow(tell):
            may_end.wait(20)
            tell("late")
            ended.set()

        heard.latest.ask(slow)
        await heard.until(lambda: heard.progress)
        assert heard.progress[0] == 0
        heard.latest.cancel()
        assert (heard.latest.busy, heard.progress[-1]) == (False, None)
        may_end.set()
        await heard.until(ended.is_set)
        heard.latest.ask(lambda tell: tell("next"))
        await heard.until(lambda: not heard.latest.busy)
        assert heard.results == ["next"]

    asyncio.run(main())


def test_without_an_event_loop_a_job_is_done_where_it_is_asked_for():
    heard, threads = Heard(), []
    heard.latest.ask(lambda tell: (threads.append(threading.current_thread()), tell(1)))
    assert (heard.results, threads) == ([1], [threading.current_thread()])
    error = ValueError("no")

    def broken(tell):
        raise error

    heard.latest.ask(broken)
    assert heard.errors == [error]
