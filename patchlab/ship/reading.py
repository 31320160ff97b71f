"""What an expression or a class body makes, told by reading it; nothing of the user's is run.

Read are literals, displays, operators, comprehensions, names, attributes of Python modules and
classes, and calls that have no effect: of builtins, of `math`, of `torch.finfo`. What else there
is, is `UNKNOWN`, and so is all that is made of it.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import math
import operator
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

UNKNOWN = object()
"""Stands for a value that reading does not tell."""

# Longer collections are not made for a comparison.
_LONGEST = 10_000
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
# These make a huge number of small ones.
_GROWING: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_MOST = 1_000
_LARGE = frozenset({"factorial", "comb", "perm", "pow", "ldexp", "prod"})
_ATOMS = (int, float, complex, str, bytes, bool, type(None), type(...))
_COLLECTIONS = (list, tuple, dict, set, frozenset, range)
# By name, so that one that the session has bound anew is not taken for it.
_CALLED = {
    name: getattr(builtins, name)
    for name in (
        *("dict", "list", "tuple", "set", "frozenset", "range", "enumerate", "zip", "reversed"),
        *("int", "float", "complex", "str", "bool", "abs", "round", "divmod", "slice"),
        *("len", "min", "max", "sum", "sorted", "any", "all"),
    )
}


def value_of(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what an expression stands for now, `UNKNOWN` if reading does not tell.

    Args:
        expression: Parsed.
        names: What its names stand for.
    """
    try:
        return _value(expression, names)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return UNKNOWN


def body_values(body: Iterable[ast.stmt], around: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → value of what the statements of a class or of a file bind, in their order.

    Functions, classes and imports are `UNKNOWN`, and so is what only one branch binds whose
    condition cannot be told.

    Args:
        body: The statements.
        around: What other names stand for.
    """
    made: dict[str, Any] = {}
    _run(body, made, ChainMap(made, dict(around)))
    return made


def is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a text, or a builtin collection."""
    return type(value) in (*_ATOMS, *_COLLECTIONS)


def _run(body: Iterable[ast.stmt], made: dict[str, Any], names: MutableMapping[str, Any]) -> None:
    for statement in body:
        if isinstance(statement, ast.Assign):
            value = value_of(statement.value, names)
            for target in statement.targets:
                _bind(target, value, made)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                _bind(statement.target, value_of(statement.value, names), made)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            read = ast.Name(statement.target.id, ast.Load())
            made[statement.target.id] = value_of(
                ast.BinOp(read, statement.op, statement.value), names
            )
        elif isinstance(statement, ast.If):
            test = value_of(statement.test, names)
            if test is UNKNOWN:
                _forget(statement, made)
            else:
                _run(statement.body if test else statement.orelse, made, names)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    made.pop(target.id, None)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            _forget(statement, made)


def _bind(target: ast.expr, value: Any, made: dict[str, Any]) -> None:
    if isinstance(target, ast.Name):
        made[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        fits = isinstance(value, tuple | list) and len(value) == len(target.elts)
        for place, inner in enumerate(target.elts):
            _bind(inner, value[place] if fits else UNKNOWN, made)
    else:
        _forget(target, made)  # A star, or `table[key] = value`.


def _forget(node: ast.AST, made: dict[str, Any]) -> None:
    """Know no more of what a statement binds, nor of what it may change."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        made[node.name] = UNKNOWN
        return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and (isinstance(inner.ctx, ast.Store) or inner.id in made):
            made[inner.id] = UNKNOWN
        elif isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            made[inner.name] = UNKNOWN
        elif isinstance(inner, ast.alias):
            made[(inner.asname or inner.name).partition(".")[0]] = UNKNOWN


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, getattr(builtins, node.id, UNKNOWN))
    if isinstance(node, ast.Attribute):
        outer = _value(node.value, names)
        # Of another object it may be a property, which is code.
        told = isinstance(outer, ModuleType | type | torch.finfo | torch.iinfo)
        return getattr(outer, node.attr) if told else UNKNOWN
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = list(_items(node.elts, names))
        made = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return UNKNOWN if any(item is UNKNOWN for item in items) else made(items)
    if isinstance(node, ast.Dict):
        return _dict(node, names)
    if isinstance(node, ast.IfExp):
        test = _value(node.test, names)
        return UNKNOWN if test is UNKNOWN else _value(node.body if test else node.orelse, names)
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return _comprehension(node, names)
    if isinstance(node, ast.Call):
        return _call(node, names)
    if isinstance(node, ast.Subscript):
        parts = [_value(node.value, names), _value(node.slice, names)]
        return parts[0][parts[1]] if all(map(is_plain, parts)) else UNKNOWN
    return _calculated(node, names)


def _items(nodes: Iterable[ast.expr], names: Mapping[str, Any]) -> Iterator[Any]:
    for node in nodes:
        if not isinstance(node, ast.Starred):
            yield _value(node, names)
            continue
        several = _value(node.value, names)
        if isinstance(several, _COLLECTIONS) and len(several) <= _LONGEST:
            yield from several
        else:
            yield UNKNOWN


def _dict(node: ast.Dict, names: Mapping[str, Any]) -> Any:
    made: dict[Any, Any] = {}
    for key, item in zip(node.keys, node.values, strict=True):
        value = _value(item, names)
        if key is None:
            if not isinstance(value, dict):
                return UNKNOWN
            made |= value
            continue
        read = _value(key, names)
        if read is UNKNOWN or value is UNKNOWN:
            return UNKNOWN
        made[read] = value
    return made


def _calculated(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an operation on plain values makes."""
    if isinstance(node, ast.UnaryOp):
        operations: list[ast.AST] = [node.op]
        parts = [_value(node.operand, names)]
    elif isinstance(node, ast.BinOp):
        operations, parts = [node.op], [_value(node.left, names), _value(node.right, names)]
    elif isinstance(node, ast.Compare):
        operations = [*node.ops]
        parts = [_value(part, names) for part in (node.left, *node.comparators)]
    elif isinstance(node, ast.BoolOp):
        parts = [_value(part, names) for part in node.values]
        if not all(map(is_plain, parts)):
            return UNKNOWN
        wanted = isinstance(node.op, ast.Or)
        return next((part for part in parts if bool(part) is wanted), parts[-1])
    else:
        return UNKNOWN
    if len(operations) != 1 or not all(map(is_plain, parts)) or _is_long(operations[0], parts):
        return UNKNOWN
    if isinstance(operations[0], ast.Is | ast.IsNot) and None not in parts:
        return UNKNOWN  # Whether two equal constants are one object is the compiler's matter.
    small = all(isinstance(part, int | float) and abs(part) <= _MOST for part in parts)
    known = _OPERATIONS | _GROWING if small else _OPERATIONS
    calculate = known.get(type(operations[0]))
    return UNKNOWN if calculate is None else calculate(*parts)


def _is_long(operation: ast.AST, parts: list[Any]) -> bool:
    """Tell of the one operation that makes a long collection of a short one."""
    sizes = [len(part) for part in parts if hasattr(part, "__len__")]
    counts = [part for part in parts if isinstance(part, int)]
    return isinstance(operation, ast.Mult) and sum(sizes) * sum(counts) > _LONGEST


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    called = _called(node.func, names)
    if called is UNKNOWN:
        return UNKNOWN
    arguments = list(_items(node.args, names))
    named = {word.arg: _value(word.value, names) for word in node.keywords if word.arg}
    given = [*arguments, *named.values()]
    if called in (torch.finfo, torch.iinfo):
        return called(*arguments) if all(type(item) is torch.dtype for item in given) else UNKNOWN
    if len(named) < len(node.keywords) or not all(map(is_plain, given)):
        return UNKNOWN
    if any(isinstance(item, _COLLECTIONS) and len(item) > _LONGEST for item in given):
        return UNKNOWN
    made = called(*arguments, **named)
    # An iterator would be used up by who looks at it.
    return list(made) if isinstance(made, enumerate | zip | reversed) else made


def _called(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The function or class that is called, if that has no effect and takes no time."""
    if isinstance(node, ast.Name) and node.id in _CALLED:
        called = _CALLED[node.id]
        return called if names.get(node.id, called) is called else UNKNOWN
    found = _value(node, names)
    if found is torch.finfo or found is torch.iinfo:
        return found
    of_math = isinstance(found, BuiltinFunctionType) and found.__self__ is math
    return found if of_math and found.__name__ not in _LARGE else UNKNOWN


def _comprehension(
    node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, names: Mapping[str, Any]
) -> Any:
    rows: list[MutableMapping[str, Any]] = [ChainMap({}, dict(names))]
    for loop in node.generators:
        inner: list[MutableMapping[str, Any]] = []
        for row in rows:
            several = _value(loop.iter, row)
            if loop.is_async or not is_plain(several) or isinstance(several, _ATOMS):
                return UNKNOWN
            for item in itertools.islice(several, _LONGEST):
                own: dict[str, Any] = {}
                _bind(loop.target, item, own)
                known = ChainMap(own, row)
                tests = [_value(test, known) for test in loop.ifs]
                if any(part is UNKNOWN for part in (*own.values(), *tests)):
                    return UNKNOWN
                if all(tests):
                    inner.append(known)
            if len(inner) >= _LONGEST:
                return UNKNOWN
        rows = inner
    if isinstance(node, ast.DictComp):
        pairs = [(_value(node.key, row), _value(node.value, row)) for row in rows]
        unknown = any(part is UNKNOWN for pair in pairs for part in pair)
        return UNKNOWN if unknown else dict(pairs)
    items = [_value(node.elt, row) for row in rows]
    if any(item is UNKNOWN for item in items):
        return UNKNOWN
    return set(items) if isinstance(node, ast.SetComp) else items
