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
