"""How a notebook shows patchlab's own errors: by the user's lines, and without patchlab's.

Such an error says what was given, what is wrong with it, and what to do; how patchlab found out
helps nobody who reads a cell. While the extension is loaded, IPython therefore leaves patchlab's
lines out of the tracebacks of these errors, and of no others. `%xmode Verbose` shows them; a
debugger has them anyway, since the traceback itself stays as it is.
"""

from __future__ import annotations

import sysconfig
import types
from collections.abc import Iterator
from typing import Any

from IPython.core.getipython import get_ipython

from patchlab.errors import PatchlabError

_STDLIB, _INSTALLED = (sysconfig.get_path(name) for name in ("stdlib", "purelib"))
# The method that IPython asks an error for.
_METHOD = "_render_traceback_"


def shorten_own_errors() -> None:
    """Leave patchlab's lines out of the tracebacks of its errors."""
    setattr(PatchlabError, _METHOD, rendered)


def show_own_errors_whole() -> None:
    """Let them have their whole tracebacks again; where they do, this does nothing."""
    if _METHOD in vars(PatchlabError):
        delattr(PatchlabError, _METHOD)


def rendered(error: PatchlabError) -> list[str]:
    """Write the traceback of an error as IPython would, without the lines of patchlab."""
    shell: Any = get_ipython()  # Who else would ask?
    shown = shell.InteractiveTB
    kind, whole = type(error), error.__traceback__
    if shown.mode == "Verbose":
        return list(shown.structured_traceback(kind, error, whole))
    cause, context, suppressed = error.__cause__, error.__context__, error.__suppress_context__
    try:
        if not _is_told_of(cause or context):
            error.__cause__ = error.__context__ = None
        return list(shown.structured_traceback(kind, error, without_own_lines(whole)))
    finally:
        error.__cause__, error.__context__ = cause, context
        error.__suppress_context__ = suppressed


def without_own_lines(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback of the same frames but patchlab's, the one given where no other is left.

    The first frame is IPython's, which runs the cell.
    """
    kept: list[types.TracebackType] = []
    inside = False
    for tb in _entries(traceback):
        # What patchlab calls of the standard library, such as contextlib, is no line of the user's.
        inside = _is_own(tb) or (inside and _is_of_python(tb))
        if not inside:
            kept.append(tb)
    made = None
    for tb in reversed(kept):
        made = types.TracebackType(made, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return made if len(kept) > 1 else traceback


def _is_told_of(cause: BaseException | None) -> bool:
    """Tell whether an error behind one of patchlab's came by lines that somebody else wrote.

    What `re` has to say of a pattern is in the message; where in `re` it said so is nothing.
    """
    return cause is not None and any(
        not _is_own(tb) and not _is_of_python(tb) for tb in _entries(cause.__traceback__)
    )


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_own(traceback: types.TracebackType) -> bool:
    # By name and not by file: what a dataclass generates has the name of its module alone.
    name = str(traceback.tb_frame.f_globals.get("__name__"))
    return name.partition(".")[0] == "patchlab"


def _is_of_python(traceback: types.TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(_STDLIB) and not file.startswith(_INSTALLED)
