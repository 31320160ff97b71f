"""Faults on demand: an exception at any one line that a piece of code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager


class Injected(KeyboardInterrupt):
    """The interrupt that a fault raises; a `BaseException`, as the kernel's own is."""


@contextmanager
def interrupt_at(step: int, within: Callable[[str], bool]):
    """Raise `Injected` when the `step`-th line of matching files is about to run; yield the count.

    Args:
        step: From 1; 0 only counts.
        within: Tells whether a file's lines count.
    """
    seen = [0]

    def trace(frame, event, argument):
        if not within(frame.f_code.co_filename):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == step:
                sys.settrace(None)
                raise Injected
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(outer)


Line = tuple[str, int]


@contextmanager
def lines_run(within: Callable[[str], bool]):
    """Yield a list that comes to hold each line that matching files run, once, in order."""
    found: dict[Line, None] = {}
    told: list[Line] = []

    def trace(frame, event, argument):
        if not within(frame.f_code.co_filename):
            return None
        if event == "line":
            found.setdefault((frame.f_code.co_filename, frame.f_lineno))
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield told
    finally:
        sys.settrace(outer)
        told.extend(found)


@contextmanager
def interrupt_on(line: Line, *, time: int = 1):
    """Raise `Injected` when a line is about to run for the `time`-th time."""
    file, number = line
    seen = [0]

    def trace(frame, event, argument):
        if frame.f_code.co_filename != file:
            return None
        if event == "line" and frame.f_lineno == number:
            seen[0] += 1
            if seen[0] == time:
                sys.settrace(None)
                raise Injected
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(outer)
