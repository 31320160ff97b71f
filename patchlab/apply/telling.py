"""How findings are told: as warnings, once for each cause, at the line of whoever can mend it.

A scope tells its findings when it ends. What is registered has no scope: what `from_pretrained` or
`from_config` has built under it is told when the outermost build is done.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType

from patchlab.apply.construct import Frame
from patchlab.errors import CatalogError, FindingWarning, NothingReplacedWarning, OverMatchWarning
from patchlab.plan.findings import Finding
from patchlab.plan.loaded import loaded_overmatches

_WARNINGS: dict[str, type[Warning]] = {
    "PL101": OverMatchWarning,
    "PL102": OverMatchWarning,
    "PL103": OverMatchWarning,
    "PL104": NothingReplacedWarning,
    "PL106": OverMatchWarning,
    "PL107": OverMatchWarning,
    "PL108": OverMatchWarning,
}
# Between a build and the line that asked for it.
_LIBRARIES = ("contextlib", "torch", "transformers")
_ASKING = ("hooks", "initializers", "uninitialized")


def warn_of(findings: Iterable[Finding], stacklevel: int) -> None:
    """Warn once for each finding that is more than information."""
    for finding in findings:
        if finding.severity != "info":
            warnings.warn(str(finding), _category(finding), stacklevel=stacklevel + 1)


def warn_of_build(frame: Frame) -> None:
    """Warn of the containers (PL101) that a build under what is registered has replaced."""
    if _caller() is not None:
        warn_caller(_containers(frame))


def warn_caller(findings: Iterable[Finding]) -> None:
    """Warn at the line that called transformers.

    A build of patchlab's own, of a skeleton to look at, is nobody's to mend, and nothing is said of
    it.
    """
    caller = _caller()
    if caller is None:
        return
    for finding in findings:
        warnings.warn_explicit(
            str(finding),
            _category(finding),
            caller.f_code.co_filename,
            caller.f_lineno,
            module=caller.f_globals.get("__name__"),
            registry=caller.f_globals.setdefault("__warningregistry__", {}),
        )


def note_build(error: Exception, frame: Frame) -> None:
    """Have an error of such a build name the container that was replaced: most likely its reason.

    The exception stays what it is. Python 3.10 knows notes by their name alone.
    """
    for finding in _containers(frame):
        error.__notes__ = [
            *getattr(error, "__notes__", ()),
            f"patchlab: key {finding.key!r} is registered. {finding}",
        ]


def _containers(frame: Frame) -> tuple[Finding, ...]:
    # A build is not to fail for want of a catalog to judge it by.
    with contextlib.suppress(CatalogError):
        if frame.attempted:
            return loaded_overmatches(frame.mapping, frozenset(frame.attempted))
    return ()


def _category(finding: Finding) -> type[Warning]:
    return _WARNINGS.get(finding.code, FindingWarning)


def _caller() -> FrameType | None:
    """Return the innermost frame outside of the libraries and of the hook that asks.

    None where that is patchlab itself.
    """
    frame: FrameType | None = sys._getframe(1)
    own = (__name__, *(f"patchlab.apply.{name}" for name in _ASKING))
    while frame is not None and (
        _root(frame) in _LIBRARIES or frame.f_globals.get("__name__") in own
    ):
        frame = frame.f_back
    return None if frame is None or _root(frame) == "patchlab" else frame


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
