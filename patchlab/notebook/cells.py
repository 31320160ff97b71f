"""The source of classes that cells define, which Python itself forgets.

`inspect.getsource` fails for a class of a cell (Python 3.11: its module, `__main__`, has no file),
so the extension keeps, for each class that a cell defined, the text of that cell. Kept by the class
object: a class that a re-run cell defines anew has its own source, and what is collected is
forgotten.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

_cells: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def record_cell(source: str, namespace: Mapping[str, Any]) -> None:
    """Keep the text of a cell for each class that it defined at its top level.

    Args:
        source: The cell as Python, with magics already transformed.
        namespace: The namespace after the cell has run.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        cls = namespace.get(node.name) if isinstance(node, ast.ClassDef) else None
        # A class that is known keeps its cell: this one may only mention the same name, in a branch
        # that did not run.
        if isinstance(cls, type) and cls.__module__ == "__main__" and cls not in _cells:
            _cells[cls] = source


def cell_source(cls: type) -> str | None:
    """Return the text of the cell that defined a class, None if none is known."""
    return _cells.get(cls)


def class_source(cls: type) -> str | None:
    """Return the class statement of a class that a cell defined, decorators included."""
    source = _cells.get(cls)
    if source is None:
        return None
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    ]
    if not found:
        return None
    node = found[-1]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno]) + "\n"
