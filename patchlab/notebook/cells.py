"""The source of classes and functions that cells define, which Python itself forgets.

`inspect.getsource` fails for a class of a cell (Python 3.11: its module, `__main__`, has no file),
so the extension keeps, for each class and function that a cell defined, the text of that cell. Kept
by the object: a class that a re-run cell defines anew has its own source, and what is collected is
forgotten.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from patchlab.ship.sources import source_finders

_cells: WeakKeyDictionary[type | FunctionType, str] = WeakKeyDictionary()


def record_cell(source: str, namespace: Mapping[str, Any]) -> None:
    """Keep the text of a cell for each class and function that it defined at its top level.

    Args:
        source: The cell as Python, with magics already transformed.
        namespace: The namespace after the cell has run.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            record_cell(_magic_body(node), namespace)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        made = namespace.get(node.name)
        # What is known keeps its cell: this one may only mention the same name, in a branch that
        # did not run.
        known = isinstance(made, type | FunctionType) and made in _cells
        if isinstance(made, type | FunctionType) and made.__module__ == "__main__" and not known:
            _cells[made] = source


def _magic_body(node: ast.Call) -> str:
    """The body of a cell magic such as `%%time`, as the transformed cell has it; "" if it is none.

    IPython runs such a body without keeping its text where tracebacks look for it.
    """
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "run_cell_magic":
        return ""
    body = node.args[-1] if node.args else None
    return body.value if isinstance(body, ast.Constant) and isinstance(body.value, str) else ""


def cell_source(made: Any) -> str | None:
    """Return the text of the cell that defined a class or function, None if none is known."""
    try:
        return _cells.get(made)
    except TypeError:  # of a kind that cannot be referred to weakly
        return None


def show_line_as_comment(frame: FrameType, text: str) -> None:
    """Let tracebacks show the line that a cell is at as a comment, such as "# %%patched A=B".

    Instead of the call that the line was rewritten to. A comment, so that the cell is Python still:
    what is none, IPython shows without colors and without marking what failed in a line.
    """
    lines = linecache.getlines(frame.f_code.co_filename)
    # The very list of the cache. What runs under another magic (%%time) has none.
    if 0 < frame.f_lineno <= len(lines):
        lines[frame.f_lineno - 1] = f"# {text.rstrip()}\n"


# So that patches can be exported to a file; the room below knows nothing of cells.
source_finders.append(cell_source)
