"""Scopes: a patch for one block, put back in every exit.

A scope is made of a frame (what the engine matches), a hold on the hook into `from_pretrained`, and
a snapshot of transformers' stores. It can be left from another context than it was entered in, in
any order, and twice. If it is not left at all (an interrupt at the very first instruction of
`__exit__`), it closes when it is collected.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from torch import nn

from patchlab.apply import construct, hooks
from patchlab.apply.conversions import Conversions, check_conversions
from patchlab.apply.rebind import rebound
from patchlab.apply.report import PatchReport
from patchlab.apply.stores import Snapshot, restore_snapshot, take_snapshot, with_change
from patchlab.apply.telling import warn_of
from patchlab.errors import ApplyError, MappingError
from patchlab.mapping.registry import Change, follow, registered_mapping
from patchlab.mapping.rules import PatchMapping
from patchlab.plan.explain import raise_errors
from patchlab.plan.loaded import loaded_overmatches
from patchlab.plan.mismatches import loaded_mismatches

OnFinding = Literal["warn", "error", "ignore"]
P = ParamSpec("P")
R = TypeVar("R")

_LOCK = threading.RLock()
_LOCKS = (_LOCK, construct.LOCK, hooks.LOCK)
_open: list[_Entry] = []
_abandoned: list[tuple[_Entry, AbstractContextManager[None]]] = []


class _Entry:
    """One entering of a scope: what has to be closed again."""

    def __init__(self, frame: construct.Frame, report: PatchReport) -> None:
        self.frame, self.report = frame, report
        self.outer = construct.open_frames()
        self.snapshot: Snapshot | None = None
        self.closed = False

    def open(self) -> None:
        with _LOCK:
            self.snapshot = take_snapshot(_marked())
            _open.append(self)
        hooks.hold(self)
        construct.open_frame(self.frame)

    def close(self) -> None:
        """Put everything back; what was done already is not done twice."""
        if self.closed:
            return
        construct.close_frame(self.frame)
        self.report.settle()
        with _LOCK:
            if self in _open:
                self._restore()
                _open.remove(self)
        hooks.release(self)
        self.report.restored = True
        self.closed = True

    def _restore(self) -> None:
        """Restore the stores, unless scopes of other contexts are open: then the last one does.

        What changed since this scope opened may be theirs. They inherit the older snapshot, so that
        the last of a group that overlapped restores what was there before the first.
        """
        if self.snapshot is None:
            return
        others = [e for e in _open if e is not self and e.frame not in self.outer]
        if not others:
            restore_snapshot(self.snapshot, _marked())
            return
        at = _open.index(self)
        for entry in others:
            if _open.index(entry) > at:
                entry.snapshot = self.snapshot


class Scope(AbstractContextManager[PatchReport]):
    """What `patched` and `apply_patches` return: a context manager and a decorator.

    Entering twice, one inside the other or in turn, opens a scope each time.
    """

    def __init__(
        self,
        mapping: PatchMapping | None,
        conversions: Conversions,
        on_finding: OnFinding,
        rebind: bool = False,
    ) -> None:
        self._mapping = mapping
        self._conversions = conversions
        self._on_finding = on_finding
        self._rebind = rebind
        self._entries: list[tuple[_Entry, AbstractContextManager[None]]] = []
        weakref.finalize(self, _abandon, self._entries).atexit = False

    def __enter__(self) -> PatchReport:
        _close_abandoned()
        registered = self._mapping is None
        mapping = registered_mapping() if self._mapping is None else self._mapping
        if self._on_finding == "error":
            _refuse_errors(mapping)
        frame = construct.Frame(mapping, registered=registered, conversions=self._conversions)
        report = PatchReport(frame)
        frame.completed = report.complete
        entry = _Entry(frame, report)
        names = rebound(mapping) if self._rebind else nullcontext()
        try:
            self._entries.append((entry, names))
            entry.open()
            names.__enter__()
        except BaseException:
            _free_locks()
            entry.close()
            self._entries[:] = [pair for pair in self._entries if pair[0] is not entry]
            raise
        return report

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            report = self._leave()
        except BaseException:
            # An interrupt in the middle: every step can be done again, so do them all.
            _free_locks()
            self._leave()
            raise
        if report is None or self._on_finding == "ignore":
            return
        if exc_type is None:
            warn_of(report.findings, stacklevel=2)
        elif issubclass(exc_type, Exception):
            # The block failed, most likely for this reason; a dead key is no reason.
            warn_of([f for f in report.findings if f.code == "PL101"], stacklevel=2)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call runs in a scope of its own.

        Coroutine functions and generator functions are followed through their whole run.

        Raises:
            ApplyError: A class, or an asynchronous generator function; use the scope inside it.
        """
        if isinstance(function, type):
            raise ApplyError(
                f"{function.__qualname__} is a class; a scope decorates functions. Decorate the "
                f"method that builds models, or use `with patched(...):` where they are built."
            )
        if inspect.isasyncgenfunction(function):
            raise ApplyError(
                f"{function.__qualname__} is an asynchronous generator function, whose body runs "
                f"in the contexts of its callers. Use `with patched(...):` inside it."
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

            return run_async  # type: ignore[return-value]
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def run_generator(*args: P.args, **kwargs: P.kwargs) -> Any:
                return (yield from _in_scope(self._again(), function(*args, **kwargs)))

            return run_generator

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._again():
                return function(*args, **kwargs)

        return run

    def _again(self) -> Scope:
        return Scope(self._mapping, self._conversions, self._on_finding, self._rebind)

    def _leave(self) -> PatchReport | None:
        """Close the innermost entering of this context, or else the last one."""
        if not self._entries:
            return None
        frames = construct.open_frames()
        here = [pair for pair in self._entries if pair[0].frame in frames]
        entry, names = (here or self._entries)[-1]
        names.__exit__(None, None, None)
        entry.close()
        self._entries[:] = [pair for pair in self._entries if pair[0] is not entry]
        return entry.report


def patched(
    mapping: dict[str, type[nn.Module]] | None = None,
    *,
    conversions: dict[str, list[Any]] | None = None,
    on_finding: OnFinding = "warn",
) -> Scope:
    """Apply a patch mapping to every model built inside a block, and put everything back after it.

    The patch holds for this context: other threads and tasks build what they always built. A model
    built inside keeps its replacements. However the block ends, the classes, the registry, the
    conversions and the recorders of transformers are then what they were before it.

    Args:
        mapping: Key → replacement class; an exact class name, or a pattern that is `re.search`ed.
            None for what is registered.
        conversions: Model type or class name → list of `WeightConverter`s for loads in the block.
        on_finding: What to do about findings: "warn" once for each, stop with an "error" before the
            block runs, or "ignore" them (the report has them in any case).

    Returns:
        A context manager that yields a `PatchReport`, and a decorator.

    Raises:
        MappingError: A rule can never work. Nothing is changed.
        ApplyError: On entering: an instance of the original cannot become the replacement.
        FindingsError: On entering, with `on_finding="error"`: a loaded class that a rule matches is
            a container of others, or a replacement can take the arguments of none of them.

    Example:
        >>> import transformers, patchlab
        >>> from transformers.models.bert.modeling_bert import BertSelfAttention
        >>> class MyAttention(BertSelfAttention): ...
        >>> config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64,
        ...     num_attention_heads=4, intermediate_size=64)
        >>> with patchlab.patched({"BertSelfAttention": MyAttention}) as report:
        ...     model = transformers.BertModel(config)
        >>> report
        BertModel: 2 × BertSelfAttention → MyAttention · restored
    """
    check_on_finding(on_finding)
    rules = None if mapping is None else PatchMapping.of(mapping)
    return Scope(rules, check_conversions(conversions), on_finding)


def apply_patches(*, rebind: bool = False) -> Scope:
    """Apply what is registered to models constructed inside a block, such as `LlamaModel(config)`.

    `from_pretrained` and `from_config` need no such block.

    Args:
        rebind: Also bind the names in transformers' Python modules to the replacements for the
            block, for code that must see the name change. Names belong to the process, so every
            thread sees them; see `patchlab.apply.rebind`.

    Returns:
        A context manager that yields a `PatchReport`, and a decorator.
    """
    return Scope(None, {}, "ignore", rebind)


def check_on_finding(on_finding: object) -> None:
    """Refuse what is no way of dealing with findings.

    Raises:
        MappingError: It is none of "warn", "error" and "ignore".
    """
    if on_finding not in ("warn", "error", "ignore"):
        raise MappingError(
            f"on_finding is {on_finding!r}; it is one of 'warn', 'error' and 'ignore'."
        )


def _refuse_errors(mapping: PatchMapping) -> None:
    found = (*loaded_overmatches(mapping), *loaded_mismatches(mapping))
    raise_errors("the block was not run:", found)


def _in_scope(scope: Scope, body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator with a scope around each of its steps, which its consumer does not see."""
    context = contextvars.copy_context()
    step: Callable[..., Any] = body.send
    value: Any = None
    context.run(scope.__enter__)
    try:
        while True:
            try:
                yielded = context.run(step, value)
            except StopIteration as stop:
                return stop.value
            try:
                step, value = body.send, (yield yielded)
            except GeneratorExit:
                context.run(body.close)
                raise
            except BaseException as error:  # noqa: BLE001  (handed on, as `yield from` does)
                step, value = body.throw, error
    finally:
        context.run(scope.__exit__, None, None, None)


def _abandon(entries: list[tuple[_Entry, AbstractContextManager[None]]]) -> None:
    """Close what a collected scope had open, at once if nothing is under way in this thread.

    The garbage collector may come in the middle of anything, of opening another scope too. Then the
    frames are only marked as closed, which is one step, and the next use of a scope does the rest.
    """
    for entry, _ in entries:
        entry.frame.is_open = False
    _abandoned.extend(entries)
    entries.clear()
    if not any(lock._is_owned() for lock in _LOCKS):  # type: ignore[attr-defined]
        _close_abandoned()


def _free_locks() -> None:
    """Let go of locks that an interrupt between the end of a `with` body and its release left held.

    Nothing calls a scope with one of them held, so what this thread holds here it lost.
    """
    for lock in _LOCKS:
        while lock._is_owned():  # type: ignore[attr-defined]
            lock.release()


def _close_abandoned() -> None:
    while _abandoned:
        entry, names = _abandoned[-1]
        names.__exit__(None, None, None)
        entry.close()
        _abandoned[:] = [pair for pair in _abandoned if pair[0] is not entry]


def _marked() -> frozenset[str]:
    return frozenset(name for entry in _open for name in entry.frame.conversions)


def _follow_registry(change: Change) -> None:
    """Let what is registered outside of any scope outlive the scopes open elsewhere."""
    with _LOCK:
        if construct.open_frames():
            return
        for entry in _open:
            if entry.snapshot is not None:
                entry.snapshot = with_change(entry.snapshot, change)


follow(_follow_registry)
