"""Whether a class or function still is what its statement says.

A notebook can change a class after its statement has run: give it another `forward`, set an
attribute, or define its base anew. The statement would then be exported and something else runs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from patchlab.ship.literals import is_equal
from patchlab.ship.sources import Definition, bound_names, own_functions, plain_function

_MISSING = object()
# Not the power, of which a huge number can come.
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def stale_class(cls: type, node: Definition, namespace: Mapping[str, Any]) -> str:
    """Say in which way a class differs from its statement, "" if in none that can be seen."""
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        value = _value(base, namespace)
        if value is cls:
            return "its base has the name that it has itself. Give it a name of its own"
        if isinstance(value, type) and value not in cls.__bases__:
            return (
                f"it was made from an older {ast.unparse(base)} than the one there is now. Run its "
                f"cell again"
            )
    if type(cls) is not type or issubclass(cls, tuple):
        return ""  # The members of an Enum, the fields of a NamedTuple: not the values in the body.
    # What its own code sets is a count or a cache, and begins anew in another process.
    state = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _is_set(n)}
    plain = {name: value for name, value in _assigned(node).items() if name not in state}
    names = set(bound_names(node))
    own = own_functions(cls)
    if not node.decorator_list:
        changed = _added_values(cls, names | state) or _taken_away(cls, node)
        if changed:
            return changed
    for name, value in vars(cls).items():
        function = plain_function(value)
        foreign = function is not None and name not in own and function.__module__ == cls.__module__
        if foreign and name not in names and not node.decorator_list:
            return _added(cls, name)
        if foreign and name in _defined(node) and not node.decorator_list:
            return _added(cls, name)
        if node.decorator_list or name not in plain:
            continue
        written = _value(plain[name], namespace)
        if written is not _MISSING and not is_equal(written, value):
            return (
                f"its {name} is {value!r} now, and its statement says {written!r}. Write the "
                f"value into the statement and run its cell again"
                if not any(isinstance(inner, ast.Name) for inner in ast.walk(plain[name]))
                else f"its {name} was set from an older {ast.unparse(plain[name])} than the one "
                f"there is now. Run its cell again"
            )
    for method in own.values():
        found = _defined(node).get(method.__name__)
        stale = stale_function(method, found, namespace) if found is not None else ""
        if stale:
            return f"{method.__name__}: {stale}"
    return ""


def stale_function(function: FunctionType, node: Definition, namespace: Mapping[str, Any]) -> str:
    """Say in which way a function differs from its statement, "" if in none that can be seen."""
    assert not isinstance(node, ast.ClassDef)
    given = [name for name in vars(function) if not name.startswith("_")]
    if given and not node.decorator_list:
        return (
            f"it was given an attribute {given[0]!r} after its def statement. Make it a constant "
            f"of its own"
        )
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(
        zip(
            positional[len(positional) - len(arguments.defaults) :],
            arguments.defaults,
            function.__defaults__ or (),
            strict=False,
        )
    )
    keyword = function.__kwdefaults__ or {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and argument.arg in keyword:
            pairs.append((argument, default, keyword[argument.arg]))
    for argument, default, value in pairs:
        written = _value(default, namespace)
        if written is not _MISSING and not is_equal(written, value):
            return (
                f"the default of {argument.arg} is {value!r}, and {ast.unparse(default)} is "
                f"another now. Run its cell again"
            )
    return ""


def _is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _value(expression: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """What a name, an attribute of one, or a constant stands for now; `_MISSING` for the rest."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        return namespace.get(expression.id, _MISSING)
    if isinstance(expression, ast.Attribute):
        outer = _value(expression.value, namespace)
        return _MISSING if outer is _MISSING else getattr(outer, expression.attr, _MISSING)
    if isinstance(expression, ast.Tuple):
        items = [_value(item, namespace) for item in expression.elts]
        return _MISSING if any(item is _MISSING for item in items) else tuple(items)
    if isinstance(expression, ast.UnaryOp | ast.BinOp):
        return _calculated(expression, namespace)
    return _MISSING


def _calculated(expression: ast.UnaryOp | ast.BinOp, namespace: Mapping[str, Any]) -> Any:
    """What an operation on numbers makes, `_MISSING` of any other."""
    if isinstance(expression, ast.UnaryOp):
        parts = [expression.operand]
    else:
        parts = [expression.left, expression.right]
    numbers = [_value(part, namespace) for part in parts]
    calculate = _OPERATIONS.get(type(expression.op))
    if calculate is None or not all(type(number) in (int, float) for number in numbers):
        return _MISSING
    try:
        return calculate(*numbers)
    except ArithmeticError:
        return _MISSING


def _assigned(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Name → value, of what the body assigns once and plainly."""
    found: dict[str, ast.expr] = {}
    twice: set[str] = set()
    for statement in node.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        for target in targets:
            if (
                isinstance(target, ast.Name)
                and isinstance(statement, ast.Assign | ast.AnnAssign)
                and statement.value is not None
            ):
                if target.id in found:
                    twice.add(target.id)
                found[target.id] = statement.value
    bound = list(bound_names(node))
    names_of_body = set(bound)
    return {
        name: value
        for name, value in found.items()
        if name not in twice
        and bound.count(name) == 1
        # A name of the body itself is not the module's.
        and not ({n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & names_of_body)
    }


def _defined(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Name → function statement without decorators, of those that nothing in the body replaces."""
    bound = bound_names(node)
    return {
        inner.name: inner
        for inner in node.body
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        and not inner.decorator_list
        and bound.count(inner.name) == 1
    }


def _added_values(cls: type, known: set[str]) -> str:
    """Tell of a public attribute that the statement does not give, and no base can have given."""
    if any("__init_subclass__" in vars(base) for base in cls.__mro__ if base is not object):
        return ""
    names = [name for name in vars(cls) if not name.startswith("_") and name not in known]
    return _added(cls, names[0]) if names else ""


def _taken_away(cls: type, node: ast.ClassDef) -> str:
    if any(isinstance(inner, ast.Delete) for inner in node.body):
        return ""
    names = [*_assigned(node), *_defined(node)]
    gone = [name for name in names if not name.startswith("__") and name not in vars(cls)]
    return (
        f"its {gone[0]} was deleted after the class statement. Run its cell again" if gone else ""
    )


def _added(cls: type, name: str) -> str:
    return (
        f"its {name} was set after the class statement. Write it into the statement, or into a "
        f"subclass"
    )
