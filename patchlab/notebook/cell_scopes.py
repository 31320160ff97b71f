"""Scopes that live as long as the cell that opened them.

A cell opens a scope with a call in its first line and goes on at top level, so nothing of the
cell's own encloses the rest of it. What ends such a scope is IPython's `post_execute` event. It
does not say whose it is, and also comes from silent cells and from cells inside other cells
(`%%capture`, a call of `run_cell`). Each scope therefore remembers the *run* that opened it, the
frame of `InteractiveShell.run_ast_nodes`, which lasts exactly as long as the cell (IPython 9.18).
At every event the scopes whose run is over are closed, and no others:

* The frame is on the stack of this thread: the cell is running, and the event is a nested cell's.
* It is not, and the run belongs to another task that is not done: the cell waits in an `await`.
* It is not, and the run belongs to another thread that lives: its own events will tell.
* Else the run is over, however it ended.

The events before a cell (`pre_execute`) ask as well, so that a scope whose end was never announced
does not outlive the next cell's start.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

OnClose = Callable[[Any], None]


@dataclass(eq=False, slots=True)
class CellScope:
    """An open scope and the run of the cell that opened it.

    Attributes:
        run: The frame that lasts as long as the cell.
        place: Code and line of the call that opened the scope.
        entered: What the scope's `__enter__` returned.
    """

    scope: AbstractContextManager[Any]
    run: FrameType
    place: tuple[CodeType, int]
    thread: threading.Thread
    task: asyncio.Task[Any] | None
    on_close: OnClose | None
    entered: Any = None

    def is_over(self, stack: list[FrameType]) -> bool:
        """Tell whether the cell has ended; `stack` is this thread's."""
        if self.thread is not threading.current_thread():
            return not self.thread.is_alive()
        if any(frame is self.run for frame in stack):
            return False
        return self.task is None or self.task.done() or self.task is _current_task()


class CellScopes:
    """The scopes that cells have open, oldest first."""

    def __init__(self) -> None:
        self._open: list[CellScope] = []

    def __len__(self) -> int:
        return len(self._open)

    def enter(
        self, scope: AbstractContextManager[Any], caller: FrameType, on_close: OnClose
    ) -> None:
        """Open a scope until the end of the cell that is running.

        Args:
            scope: Entered here; it may be left from any context, more than once.
            caller: Frame of the call in the cell.
            on_close: Called once with what the scope's `__enter__` returned, after it was left.

        Raises:
            UsageError: No cell is running.
        """
        run = next((f for f in _outward(caller) if f.f_code is _RUN), None)
        if run is None:
            raise UsageError(
                "%%patched needs a cell that IPython runs; elsewhere use "
                "`with patchlab.patched({...}):`."
            )
        place = (caller.f_code, caller.f_lineno)
        # A magic that runs its body many times (%%timeit) comes by the same place again.
        for again in [s for s in self._open if s.run is run and s.place == place]:
            again.on_close = None
            self._close(again)
        opened = CellScope(scope, run, place, threading.current_thread(), _current_task(), on_close)
        # Listed before it is entered: an interrupt between the two leaves nothing open unseen.
        self._open.append(opened)
        try:
            opened.entered = scope.__enter__()
        except BaseException:
            self._open.remove(opened)
            raise

    def close_finished(self, *_: Any) -> None:
        """Close the scopes whose cell is over, the newest first."""
        if not self._open:
            return
        stack = list(_outward(sys._getframe(1)))
        self._close_all([s for s in self._open if s.is_over(stack)])

    def close(self) -> None:
        """Close every scope without a word, whatever its cell does."""
        for opened in self._open:
            opened.on_close = None
        self._close_all(list(self._open))

    def _close_all(self, scopes: list[CellScope]) -> None:
        errors: list[BaseException] = []
        for opened in reversed(scopes):
            try:
                self._close(opened)
            except Exception as error:  # noqa: BLE001 - raised below, after the others are closed
                errors.append(error)
        if errors:
            raise errors[0]

    def _close(self, opened: CellScope) -> None:
        # Left first and forgotten after: an interrupt between the two leaves it twice, which does
        # no harm. One that cannot be left is forgotten too, or every later cell would fail on it.
        refused: Exception | None = None
        try:
            opened.scope.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - raised below
            refused = error
        if opened in self._open:
            self._open.remove(opened)
        if refused is not None:
            raise refused
        if opened.on_close is not None:
            opened.on_close(opened.entered)


_RUN: CodeType = InteractiveShell.run_ast_nodes.__code__


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
