"""Whether what a file imports is, in another process, what it is in this one.

A session can put a function of its own into a class of a package, set `settings.SCALE`, or edit a
Python file after it was imported. The file that is exported imports what the home has.
"""

from __future__ import annotations

import ast
import functools
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from patchlab.ship.homes import is_of_the_user
from patchlab.ship.reading import UNKNOWN, body_values, is_plain
from patchlab.ship.sources import compiles_to, own_functions, plain_function
from patchlab.ship.staleness import filled_names, same_value, shortened

_SESSION = ("__main__", "__mp_main__")


def changed_at_home(module: ModuleType, name: str, notes: list[str]) -> str:
    """Say in which way a name of a Python module differs from what an import gives elsewhere.

    Args:
        module: The home.
        name: What is imported from it, or read off it.
        notes: What is no reason to refuse it, and still to be told, is added.
    """
    value = vars(module).get(name)
    inner = value if isinstance(value, type) else plain_function(value)
    if inner is not None and inner.__module__ in _SESSION:
        return f"the session has put its own {name} into {module.__name__}. Use it by its own name"
    if isinstance(value, type):
        for cls in value.__mro__:
            replaced = _replaced(cls)
            if replaced:
                return (
                    f"the session has put its own {replaced} into {cls.__name__} of "
                    f"{cls.__module__}. Write it into a subclass"
                )
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or not is_of_the_user(module.__name__):
        return ""
    try:
        text = Path(file).read_text(encoding="utf-8")
        tree = _parsed(text)
    except (OSError, SyntaxError, ValueError):
        return ""
    names = _top_names(tree, text)
    if names is not None and name not in names:
        return f"the file of {module.__name__} has no {name}, now at least. Write it there"
    if _is_edited(module, Path(file)):
        _note_edited(module, notes)
        return ""
    if inner is not None:
        return _changed_definition(value, inner, module, tree, text, notes)
    return _changed_value(name, value, module, tree, notes)


def changed_where_read(
    module: ModuleType, attributes: Sequence[str], notes: list[str]
) -> tuple[str, str]:
    """Return what `changed_at_home` says of `module.a.b`, after the part of it that it is about."""
    for number, attribute in enumerate(attributes, 1):
        inner = vars(module).get(attribute)
        if not isinstance(inner, ModuleType):
            return ".".join(attributes[:number]), changed_at_home(module, attribute, notes)
        module = inner
    return "", ""


def _replaced(cls: type) -> str:
    """The name of a function of the session in a class that is none of its own, or ""."""
    if cls.__module__ in _SESSION:
        return ""
    for name, value in vars(cls).items():
        function = plain_function(value)
        if function is not None and function.__module__ in _SESSION:
            return name
    return ""


def _changed_definition(
    value: Any, inner: Any, module: ModuleType, tree: ast.Module, text: str, notes: list[str]
) -> str:
    if inner.__module__ != module.__name__:
        return ""
    codes: list[CodeType]
    if isinstance(inner, type):
        codes = [function.__code__ for function in own_functions(inner).values()]
    else:
        codes = [inner.__code__]
    if not compiles_to(text, codes):
        _note_edited(module, notes)
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == inner.__name__ and value is inner:
            return _changed_class(value, node, module, tree, notes)
    return ""


def _changed_class(
    cls: type, node: ast.ClassDef, module: ModuleType, tree: ast.Module, notes: list[str]
) -> str:
    # What the file itself sets after the statement is set wherever it is imported.
    later = {name for name, is_attribute in filled_names(tree) if is_attribute}
    later |= {
        inner.attr
        for inner in ast.walk(tree)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
    }
    for name, written in body_values(node.body, vars(module)).items():
        value = vars(cls).get(name, UNKNOWN)
        if name in later or written is UNKNOWN or not is_plain(value):
            continue
        if same_value(written, value):
            continue
        says = f"its {name} is {shortened(value)} now, and {module.__name__} says "
        says += shortened(written)
        if isinstance(value, list | dict | set):
            notes.append(f"{cls.__qualname__} is imported: {says}.")  # Others may fill it.
            continue
        return f"{says}. Write the value there, or into a subclass"
    return ""


def _changed_value(
    name: str, value: Any, module: ModuleType, tree: ast.Module, notes: list[str]
) -> str:
    written = body_values(tree.body, {}).get(name, UNKNOWN)
    if written is UNKNOWN or not is_plain(value) or same_value(written, value):
        return ""
    counted = {
        name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
    }
    says = f"it is {shortened(value)} now, and {module.__name__} says {shortened(written)}"
    if isinstance(value, list | dict | set):
        # A table that other modules fill when they are imported is filled there as well.
        filled = any(found == (name, False) for found in filled_names(tree))
        if not filled:
            notes.append(f"{name} is imported: {says}.")
        return ""
    return "" if name in counted else f"{says}. Write the value there, or into a name of your own"


def _note_edited(module: ModuleType, notes: list[str]) -> None:
    note = f"{module.__name__} was edited after it was imported here; other processes have the new."
    notes.extend([] if note in notes else [note])


def _is_edited(module: ModuleType, file: Path) -> bool:
    """Tell whether a file is another than the one that Python compiled for this process."""
    cached = getattr(module.__spec__, "cached", None)
    if sys.dont_write_bytecode:
        return False  # What lies there may be from another session.
    try:
        # Flags, then the time and the size of the source (PEP 552).
        head = Path(str(cached)).read_bytes()[4:16]
        found = file.stat()
    except OSError:
        return False
    kept = int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF
    flags, *known = struct.unpack("<III", head) if len(head) == 12 else (1, 0, 0)
    return flags == 0 and tuple(known) != kept


def _top_names(tree: ast.Module, text: str) -> set[str] | None:
    """The names that a file binds, None where it can bind others."""
    stars = any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree))
    if stars or any(word in text for word in ("globals()", "setattr(", "exec(", "vars()")):
        return None
    found = set(body_values(tree.body, {}))
    return {
        *found,
        *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)),
        *(name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names),
    }


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)
