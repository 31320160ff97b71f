"""Whether a class or function still is what its statement says.

A notebook can change a class after its statement has run: give it another `forward`, set an
attribute, add to a list that it holds, or define its base anew. The statement would then be
exported and something else runs. What the statement makes is told by reading it (`reading`), and
where that does not tell, a note says what the session has.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator, Mapping
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch

from patchlab.ship.literals import is_equal
from patchlab.ship.reading import UNKNOWN, body_values, is_plain, value_of
from patchlab.ship.sources import Definition, bound_names, own_functions, plain_function

# Python's own decorators, under which a function of the body stays the one that runs.
_TRANSPARENT = frozenset({"property", "staticmethod", "classmethod", "cached_property"})
_MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "add", "discard"}
    | {"update", "setdefault", "popitem", "appendleft", "popleft", "subtract"}
)
_GIVEN = frozenset({"_abc_impl", "_is_protocol", "_is_runtime_protocol"})


def stale_class(cls: type, node: Definition, namespace: Mapping[str, Any], notes: list[str]) -> str:
    """Say in which way a class differs from its statement, "" if in none that can be seen.

    Args:
        cls: The class as it is now.
        node: Its statement.
        namespace: What the names in it stand for.
        notes: What is no reason to refuse it, and still to be told, is added.
    """
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        value = value_of(base, namespace)
        if value is cls:
            return "its base has the name that it has itself. Give it a name of its own"
        if isinstance(value, type) and value not in cls.__bases__:
            return (
                f"it was made from an older {ast.unparse(base)} than the one there is now. Run its "
                f"cell again"
            )
    # The members of an Enum, the fields of a NamedTuple or TypedDict: not the values in the body.
    if issubclass(cls, tuple) or isinstance(cls, enum.EnumMeta) or hasattr(cls, "__total__"):
        return ""
    return (
        _changed_names(cls, node)
        or _changed_functions(cls, node)
        or _changed_values(cls, node, namespace, notes)
        or _changed_inside(cls, node, namespace, notes)
    )


def stale_function(
    function: FunctionType, node: Definition, namespace: Mapping[str, Any], notes: list[str]
) -> str:
    """Say in which way a function differs from its statement, "" if in none that can be seen."""
    assert not isinstance(node, ast.ClassDef)
    given = [name for name in vars(function) if not name.startswith("_")]
    if given and not node.decorator_list:
        return (
            f"it was given an attribute {given[0]!r} after its def statement. Make it a constant "
            f"of its own"
        )
    memos = {name for name, _ in filled_names(node)}
    for argument, default, value in _defaults(function, node):
        written = value_of(default, namespace)
        if written is UNKNOWN or same_value(written, value):
            continue
        if argument in memos and is_plain(value):
            # What it fills itself is a memory, and begins anew in another process.
            notes.append(f"{argument} of {function.__qualname__} begins as its statement says.")
        elif not _names(default) & namespace.keys():
            return (
                f"the default of {argument} is {shortened(value)} now, and its statement says "
                f"{shortened(written)}. Write the value into the statement and run its cell again"
            )
        else:
            return (
                f"the default of {argument} is {shortened(value)}, and {ast.unparse(default)} is "
                f"another now. Run its cell again"
            )
    return ""


def _changed_names(cls: type, node: ast.ClassDef) -> str:
    """Tell of an attribute that was added to a class or taken away from it."""
    # A decorator, a metaclass or a base can have given what the statement does not.
    if node.decorator_list or type(cls).__module__ not in ("builtins", "abc"):
        return ""
    own = own_functions(cls)
    names = set(bound_names(node))
    for name, value in vars(cls).items():
        function = plain_function(value)
        if name in names or name in own or name in _GIVEN:
            continue
        if function is not None and function.__module__ == cls.__module__:
            return _added(name)
    state = set(_state(node))
    if not any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object):
        for name, value in vars(cls).items():
            known = name in names or name in state or name in _GIVEN
            # `__slots__` makes them.
            known = known or isinstance(value, MemberDescriptorType)
            # What is private may be Python's, torch's or transformers' own.
            if not known and (not name.startswith("_") or _is_private_data(name, value)):
                return _added(name)
    if not any(isinstance(inner, ast.Delete) for inner in node.body):
        bound = bound_names(node)
        for name in [*_assigned(node), *_defined(node)]:
            if name not in vars(cls) and not name.startswith("__") and bound.count(name) == 1:
                return f"its {name} was deleted after the class statement. Run its cell again"
    return ""


def _changed_functions(cls: type, node: ast.ClassDef) -> str:
    """Tell of a function that stands where the statement has one of its own."""
    decorated = {
        inner.name
        for inner in node.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(not _is_transparent(decorator) for decorator in inner.decorator_list)
    }
    lambdas = {
        name
        for name, value in _assigned(node).items()
        if any(isinstance(inner, ast.Lambda) for inner in _outermost(value))
    }
    bound = bound_names(node)
    for name in ({*_defined(node)} - decorated) | lambdas:
        function = plain_function(vars(cls).get(name))
        if function is None or node.decorator_list or bound.count(name) > 1:
            continue
        inside = function.__qualname__.startswith(f"{cls.__qualname__}.")
        if not inside and function.__module__ == cls.__module__:
            return _added(name)
    return ""


def _changed_values(
    cls: type, node: ast.ClassDef, namespace: Mapping[str, Any], notes: list[str]
) -> str:
    """Tell of a value that is another than the statement gives."""
    state = set(_state(node))
    # What its metaclass makes of a value may be a descriptor, and a decorator may take it away.
    bound = set(bound_names(node))
    plainly = type(cls).__module__ in ("builtins", "abc") and not node.decorator_list
    assigned = _assigned(node)
    for name, written in body_values(node.body, namespace).items():
        if name not in vars(cls) or (name.startswith("__") and name.endswith("__")):
            continue
        value = vars(cls)[name]
        if written is UNKNOWN:
            data = is_plain(value) or isinstance(value, dict | list | set | torch.Tensor)
            if data and _is_calculated(assigned.get(name)):
                notes.append(
                    f"{name} of {cls.__qualname__} is what `{ast.unparse(assigned[name])}` makes "
                    f"where the file is imported; in the session it was {shortened(value)}."
                )
            continue
        if same_value(written, value) or not (plainly or is_plain(value)):
            continue
        if name in state:
            # What its own code sets is a count or a cache, and begins anew in another process.
            notes.append(f"{name} of {cls.__qualname__} begins as its statement says.")
            continue
        expression = assigned.get(name)
        if expression is not None and _names(expression) & (namespace.keys() - bound):
            return (
                f"its {name} was set from an older {ast.unparse(expression)} than the one there is "
                f"now, or changed since. Run its cell again"
            )
        decorator = ", or leave it out there if a decorator sets it," if node.decorator_list else ""
        return (
            f"its {name} is {shortened(value)} now, and its statement says {shortened(written)}. "
            f"Write the value into the statement{decorator} and run its cell again"
        )
    return ""


def _changed_inside(
    cls: type, node: ast.ClassDef, namespace: Mapping[str, Any], notes: list[str]
) -> str:
    """Tell of what has changed in the methods and the inner classes."""
    functions = {
        inner.name: inner
        for inner in node.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.decorator_list
    }
    bound = bound_names(node)
    own_names = dict.fromkeys(bound, UNKNOWN)
    around = {**namespace, **own_names, **body_values(node.body, namespace)}
    for method in own_functions(cls).values():
        found = functions.get(method.__name__)
        if found is not None and bound.count(method.__name__) == 1:
            stale = stale_function(method, found, around, notes)
            if stale:
                return f"{method.__name__}: {stale}"
    for inner in node.body:
        value = vars(cls).get(inner.name) if isinstance(inner, ast.ClassDef) else None
        if not isinstance(value, type) or not isinstance(inner, ast.ClassDef):
            continue
        if value.__qualname__ == f"{cls.__qualname__}.{inner.name}":
            stale = stale_class(value, inner, around, notes)
            if stale:
                return f"{inner.name}: {stale}"
    return ""


def _defaults(
    function: FunctionType, node: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, ast.expr, Any]]:
    """The name, the expression and the value of each default."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    given = function.__defaults__ or ()
    for argument, default, value in zip(with_default, arguments.defaults, given, strict=False):
        yield argument.arg, default, value
    keyword = function.__kwdefaults__ or {}
    for argument, written in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if written is not None and argument.arg in keyword:
            yield argument.arg, written, keyword[argument.arg]


def _state(node: ast.ClassDef) -> Iterator[str]:
    """The attributes that the code of a class sets or fills for the class."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store | ast.Del):
            # `self.scale = 2` gives the instance one, and leaves the class's as it is.
            of_instance = isinstance(inner.value, ast.Name) and inner.value.id == "self"
            yield from () if of_instance else (inner.attr,)
    yield from (name for name, is_attribute in filled_names(node) if is_attribute)


def filled_names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield what `x[key] = value` and `x.append(value)` fill, and whether it is an attribute."""
    for inner in ast.walk(node):
        filled: ast.AST | None = None
        if isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store | ast.Del):
            filled = inner.value
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            filled = inner.func.value if inner.func.attr in _MUTATORS else None
        while isinstance(filled, ast.Subscript):
            filled = filled.value
        if isinstance(filled, ast.Attribute):
            yield filled.attr, True
        elif isinstance(filled, ast.Name):
            yield filled.id, False


def _assigned(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Name → expression, of what the body assigns plainly."""
    found: dict[str, ast.expr] = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        assert statement.value is not None
        found |= {t.id: statement.value for t in targets if isinstance(t, ast.Name)}
    return found


def _defined(node: ast.ClassDef) -> set[str]:
    """The names of the functions of a body that no decorator of the user's wraps."""
    return {
        inner.name
        for inner in node.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        and all(_is_transparent(decorator) for decorator in inner.decorator_list)
    }


def _is_transparent(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id in _TRANSPARENT


def _outermost(value: ast.expr) -> list[ast.expr]:
    """An expression, or what Python's own decorators are called with."""
    if isinstance(value, ast.Call) and _is_transparent(value.func):
        return value.args
    return [value]


def _names(expression: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(expression) if isinstance(inner, ast.Name)}


def _is_calculated(expression: ast.expr | None) -> bool:
    return expression is not None and any(isinstance(n, ast.Call) for n in ast.walk(expression))


def _is_private_data(name: str, value: Any) -> bool:
    others = name.startswith(("__", "_torch", "_dynamo", "_hf"))
    return not others and is_plain(value)


def same_value(written: Any, value: Any) -> bool:
    """Tell whether a value is what a statement says."""
    # The text tells that a NaN is a NaN.
    return is_equal(written, value) or (
        type(written) is type(value) and is_plain(value) and repr(written) == repr(value)
    )


def shortened(value: Any) -> str:
    """Return a value as it is written, its beginning if that is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _added(name: str) -> str:
    return (
        f"its {name} was set after the class statement. Write it into the statement, or into a "
        f"subclass"
    )
