"""Faults on demand: an exception at any one line that a piece of code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager


class Injected(KeyboardInterrupt):
    """The interrupt that a fault raises; a `BaseException`, as the kernel's own is."""


Line = tuple[str, int]


@contextmanager
def interrupt_at(step: int, within: Callable[[str], bool]):
    """Raise `Injected` when the `step`-th line of matching files is about to run; yield the count.

    Args:
        step: From 1; 0 only counts.
        within: Tells whether a file's lines count.
    """
    seen = [0]
    with _traced(within, lambda _: _raise_at(step, seen)):
        yield seen


@contextmanager
def lines_run(within: Callable[[str], bool]):
    """Yield a list that comes to hold each line that matching files run, once, in order."""
    found: dict[Line, None] = {}
    told: list[Line] = []
    try:
        with _traced(within, found.setdefault):
            yield told
    finally:
        told.extend(found)


@contextmanager
def interrupt_on(line: Line, *, time: int = 1):
    """Raise `Injected` when a line is about to run for the `time`-th time."""
    seen = [0]

    def on_line(at: Line) -> None:
        if at == line:
            _raise_at(time, seen)

    with _traced(lambda file: file == line[0], on_line):
        yield seen


@contextmanager
def _traced(within: Callable[[str], bool], on_line: Callable[[Line], object]):
    """Call a function before each line of matching files that runs in the block."""

    def trace(frame, event, argument):
        if not within(frame.f_code.co_filename):
            return None
        if event == "line":
            on_line((frame.f_code.co_filename, frame.f_lineno))
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


def _raise_at(step: int, seen: list[int]) -> None:
    seen[0] += 1
    if seen[0] == step:
        sys.settrace(None)
        raise Injected
