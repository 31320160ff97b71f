"""Calling constructors outside of whatever scopes are open around the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from patchlab.apply.construct import Frame, close_frame, open_frame
from patchlab.model.skeleton import without_scopes

T = TypeVar("T")


def under(frame: Frame, function: Callable[[], T]) -> T:
    """Call a function outside of every scope but with one frame open, and close that for certain.

    The second `close_frame` is for an interrupt at the very line of the first.
    """

    def call() -> T:
        try:
            try:
                open_frame(frame)
                return function()
            finally:
                close_frame(frame)
        except BaseException:
            close_frame(frame)
            raise

    return without_scopes(call)
