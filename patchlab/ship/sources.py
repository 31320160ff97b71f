"""Where the source of a class or function is, and whether it is the source that really runs.

A cell that is run again leaves several texts of one class behind, and a file can have changed since
it was imported. So a text counts only if compiling it gives the very code objects that the class or
function runs, line numbers included. A class without a function of its own gives nothing to
compare; for it count, in this order, the text that a finder knows for this very class, the script
that is run, and a text that IPython keeps if it is the only one with such a class.

`source_finders` is where the notebook room says what it knows of classes that cells define.
"""

from __future__ import annotations
import __future__

import ast
import enum
import functools
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from patchlab.errors import ExportError

SourceFinder = Callable[[Any], str | None]

source_finders: list[SourceFinder] = []
"""Each takes a class or function and returns the whole text (a cell, a file) that has defined this
very object, or None."""

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_LATE_ANNOTATIONS = __future__.annotations.compiler_flag


@dataclass(frozen=True, slots=True)
class Statement:
    """A class or function statement as it was written.

    Attributes:
        text: Without indentation, with decorators and the comment lines right above; ends in a line
            feed.
        node: The same, parsed.
        late_annotations: Whether it was compiled under `from __future__ import annotations`.
    """

    text: str
    node: Definition
    late_annotations: bool


def function_statement(function: FunctionType) -> Statement:
    """Return the statement of a function at the top level of a cell or file.

    Raises:
        ExportError: There is none, or none that compiles to what the function runs.
    """
    code = function.__code__
    known = ["".join(linecache.getlines(code.co_filename, function.__globals__))]
    texts = [text for text in [*known, *(find(function) for find in source_finders)] if text]
    if not texts:
        raise ExportError(
            f"its source is gone: it was typed at a prompt or made by exec ({code.co_filename}). "
            f"Define it in a cell or a file"
        )
    for text in texts:
        for node in _definitions(text):
            same = node.name == code.co_name and _first_line(node) == code.co_firstlineno
            if same and compiles_to(text, [code]):
                return _statement(text, node, bool(code.co_flags & _LATE_ANNOTATIONS))
    raise ExportError(
        f"the source at hand ({_short(code.co_filename)}) is not what it was made from. Run its "
        f"cell, or import its file, again"
    )


def class_statement(cls: type) -> Statement:
    """Return the statement of a class at the top level of a cell or file.

    Raises:
        ExportError: There is none, none that compiles to what its methods run, or several that it
            might have been made from.
    """
    functions = own_functions(cls)
    codes = [function.__code__ for function in functions.values()]
    seen = False
    for text, is_told in _texts(cls, list(functions.values())):
        for node in _definitions(text):
            if not isinstance(node, ast.ClassDef) or node.name != cls.__name__:
                continue
            seen = True
            lines = range(_first_line(node), (node.end_lineno or node.lineno) + 1)
            inside = all(code.co_firstlineno in lines for code in codes)
            certain = is_told or bool(codes) or _binds_the_same(cls, node)
            if inside and certain and compiles_to(text, codes) and _is_at(cls, node):
                if not codes and _is_one_of_several(cls, node, text):
                    raise ExportError(
                        "its cell or file defines it in several branches and nothing tells which "
                        "one has run. Write one class statement, and the choice inside of it"
                    )
                return _statement(text, node, _is_late(cls, codes, text))
    if seen:
        raise ExportError(
            "the source at hand is not what it was made from. Run its cell, or import its file, "
            "again"
        )
    raise ExportError(
        "no class statement of it is known: it was made by type() or by a function, or its source "
        "is gone. Write it as a class statement at the top level of a cell or file"
    )


def own_functions(cls: type) -> dict[str, FunctionType]:
    """Return name → function of what a class statement itself defines, without what others add."""
    found = {}
    for name, value in vars(cls).items():
        function = plain_function(value)
        if (
            function is not None
            and function.__qualname__ == f"{cls.__qualname__}.{function.__name__}"
            and function.__module__ == cls.__module__
            and not is_generated(function)
        ):
            found[name] = function
    return found


def namespace_of(cls: type) -> Mapping[str, Any]:
    """Return the names that the statement of a class can see around it."""
    for value in vars(cls).values():
        function = plain_function(value)
        if function is not None and function.__module__ == cls.__module__:
            return function.__globals__
    return vars(sys.modules.get(cls.__module__, ModuleType("")))


def is_generated(function: FunctionType) -> bool:
    """Tell whether a function was compiled from a string, as `dataclass` and `exec` do."""
    return function.__code__.co_filename.startswith(("<string>", "<attrs generated"))


def bound_names(node: ast.ClassDef) -> list[str]:
    """Return the names that a class body binds, as often as it does."""
    found = []
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(inner.name)
            continue
        if isinstance(inner, ast.comprehension | ast.Lambda):
            continue  # Its names are its own.
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.append(inner.id)
        elif isinstance(inner, ast.alias):
            found.append((inner.asname or inner.name).partition(".")[0])
        waiting += ast.iter_child_nodes(inner)
    return found


def plain_function(value: Any) -> FunctionType | None:
    """Return the function inside of a method, property or decorated function, None if none is."""
    for attribute in ("fget", "__func__", "func"):
        inner = getattr(value, attribute, None)
        if isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            value = inner if inner is not None else value
    try:
        value = inspect.unwrap(value)
    except ValueError:
        return None
    return value if isinstance(value, FunctionType) else None


def _texts(cls: type, functions: list[FunctionType]) -> Iterator[tuple[str, bool]]:
    """Texts that may have defined a class, each with whether a finder says that it has."""
    for function in functions:
        lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
        yield "".join(lines), False
    for finder in source_finders:
        text = finder(cls)
        if text:
            yield text, True
    if functions:
        return
    namespace: Mapping[str, Any] = vars(sys.modules.get(cls.__module__, object))
    file = namespace.get("__file__")
    if isinstance(file, str):
        yield "".join(linecache.getlines(file)), False
    kept = {
        "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None and isinstance(name, str)
    }
    of_class = {
        statement.text: text
        for text in sorted(kept)
        if f"class {cls.__name__}" in text
        for node in _definitions(text)
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
        for statement in [_statement(text, node, False)]
    }
    if len(of_class) > 1:
        raise ExportError(
            "several cells define a class of this name and nothing tells which one this is. Load "
            "the extension (%load_ext patchlab) before the cell that defines it, and run it again"
        )
    for text in of_class.values():
        yield text, False


@functools.lru_cache(maxsize=256)
def _definitions(text: str) -> tuple[Definition, ...]:
    """Class and function statements outside of functions and classes, last first."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    found: list[Definition] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(child)
            elif not isinstance(child, ast.expr):
                visit(child)

    visit(tree)
    return tuple(sorted(found, key=lambda node: -node.lineno))


def compiles_to(text: str, codes: list[CodeType]) -> bool:
    """Tell whether a text compiles to all of these code objects."""
    for code in codes:
        flags = code.co_flags & _LATE_ANNOTATIONS
        if code not in _code_objects(text, flags).get(code.co_firstlineno, ()):
            return False
    return True


@functools.lru_cache(maxsize=64)
def _code_objects(text: str, flags: int) -> dict[int, list[CodeType]]:
    """First line → the code objects that a text compiles to, as a file and as a cell.

    IPython compiles each statement of a cell apart. That gives other code: Python 3.11 and 3.12
    call an attribute of a name in another way if the compiled text itself imports that name.
    """
    # A cell may await at its top level; the functions in it are compiled as ever.
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree = ast.parse(text)
        units: list[Any] = [text, *(ast.Module([node], []) for node in tree.body)]
        waiting = [compile(unit, "<source>", "exec", flags, dont_inherit=True) for unit in units]
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[CodeType]] = {}
    while waiting:
        code = waiting.pop()
        found.setdefault(code.co_firstlineno, []).append(code)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def _statement(text: str, node: Definition, late_annotations: bool) -> Statement:
    # Not `splitlines`, which also splits at a form feed, where Python counts no line.
    lines = re.split(r"\r\n|\r|\n", text)
    first, last = _first_line(node), node.end_lineno or node.lineno
    indent = " " * node.col_offset
    while first > 1 and lines[first - 2].startswith(indent + "# "):
        first -= 1
    found = textwrap.dedent("\n".join(lines[first - 1 : last])) + "\n"
    try:
        parsed = ast.parse(found).body
    except SyntaxError:
        parsed = []
    # Taking the indentation away can change a string of several lines.
    if len(parsed) != 1 or ast.dump(parsed[0]) != ast.dump(node):
        raise ExportError(
            "its statement is part of a larger one and cannot be taken out. Write it at the top "
            "level of a cell or file, on lines of its own"
        )
    return Statement(found, node, late_annotations)


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _is_at(cls: type, node: ast.ClassDef) -> bool:
    # From Python 3.13 a class knows its first line.
    line = vars(cls).get("__firstlineno__")
    return line is None or line == _first_line(node)


def _binds_the_same(cls: type, node: ast.ClassDef) -> bool:
    """Tell whether a class without functions has the names that a statement gives it."""
    if node.decorator_list:
        return True
    own = {name for name in vars(cls) if not name.startswith("_")}
    # `width: int` alone binds nothing, except where it is a field.
    bare = {
        inner.target.id
        for inner in node.body
        if isinstance(inner, ast.AnnAssign) and inner.value is None
        if isinstance(inner.target, ast.Name)
    }
    bound = set(bound_names(node))
    public = {name for name in bound if not name.startswith("_")}
    private = {name for name in bound - public - bare if not name.startswith("__")}
    known = private <= vars(cls).keys() or isinstance(cls, enum.EnumMeta)
    same = own in (public, public - bare)
    return same and known and cls.__doc__ == _documented(cls, node)


def _documented(cls: type, node: ast.ClassDef) -> str | None:
    found = ast.get_docstring(node, clean=False)
    made = cls.__doc__ if isinstance(cls, enum.EnumMeta) or issubclass(cls, tuple) else None
    return found if found is not None else made


def _is_one_of_several(cls: type, node: ast.ClassDef, text: str) -> bool:
    """Tell whether a text has other statements of a class, of which not just the last counts."""
    if "__firstlineno__" in vars(cls):
        return False
    found = [
        other
        for other in _definitions(text)
        if isinstance(other, ast.ClassDef)
        and other.name == node.name
        and _binds_the_same(cls, other)
        and ast.dump(other) != ast.dump(node)
    ]
    return any(other.col_offset or node.col_offset for other in found)


def _is_late(cls: type, codes: list[CodeType], text: str) -> bool:
    if codes:
        return any(code.co_flags & _LATE_ANNOTATIONS for code in codes)
    # In IPython the import of one cell holds for all that follow.
    namespace: Mapping[str, Any] = vars(sys.modules.get(cls.__module__, object))
    return namespace.get("annotations") is __future__.annotations


def _short(filename: str) -> str:
    """A file's name without the folders, which differ from machine to machine."""
    return filename.replace("\\", "/").rpartition("/")[2]
