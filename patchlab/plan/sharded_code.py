"""What the code of a replacement does to tensors that tensor parallelism splits, read by `ast`.

Only methods that a replacement and its bases outside of transformers and torch define are read:
what is inherited is transformers' own, and fits its plan. Reading is an estimate: a count that is
given by another way is not seen, and nothing is seen where no source can be read.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

HEAD_COUNTS = frozenset(
    {
        "num_attention_heads",
        "num_key_value_heads",
        "num_heads",
        "num_kv_heads",
        "num_query_heads",
        "n_heads",
        "n_head",
    }
)
_SHAPES = frozenset({"view", "reshape", "unflatten", "split", "split_with_sizes", "expand"})
# After these the last dimension is another one, such as that of a head.
_RESHAPES = frozenset(
    {"view", "reshape", "unflatten", "flatten", "transpose", "permute", "movedim", "T", "mT"}
)
_REDUCTIONS = frozenset(
    {
        "mean",
        "sum",
        "norm",
        "vector_norm",
        "var",
        "std",
        "prod",
        "softmax",
        "log_softmax",
        "logsumexp",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "topk",
        "cumsum",
        "normalize",
    }
)
_NORMS = frozenset({"rms_norm", "layer_norm", "group_norm"})
_LIBRARIES = ("torch", "transformers", "builtins")
Found = tuple[str, int]


def own_methods(cls: type) -> tuple[ast.FunctionDef, ...]:
    """Return the methods that are not inherited from transformers or torch, parsed."""
    found: dict[str, ast.FunctionDef] = {}
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            break
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name not in found:
                parsed = _parsed(getattr(inspect.unwrap(value), "__code__", None))
                if parsed is not None:
                    found[name] = parsed
    return tuple(found.values())


def head_counts(method: ast.FunctionDef, cls: type) -> Iterator[str]:
    """Return which head counts a method shapes tensors by, as they are written."""
    if method.name == "__init__":
        return
    counts = _counts_of_self(cls)
    known: dict[str, str] = {}
    for statement in _statements(method):
        for target, value in _assignments(statement):
            read = _count_in(value, known, counts)
            if isinstance(target, ast.Name):
                if read:
                    known[target.id] = read
                else:
                    known.pop(target.id, None)
        for call in _calls(statement):
            if isinstance(call.func, ast.Attribute) and call.func.attr in _SHAPES:
                for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                    read = _count_in(argument, known, counts)
                    if read:
                        yield read


def reductions(
    method: ast.FunctionDef, split: frozenset[str], joined: frozenset[str], norms: frozenset[str]
) -> Iterator[Found]:
    """Return the reductions over the last dimension of what split projections return.

    Args:
        method: The method.
        split: Children whose output is split over the ranks.
        joined: Children that take such a thing, and return what is whole again.
        norms: Children that normalize over the last dimension.

    Returns:
        Each as its text and the line of the file.
    """
    if method.name == "__init__":
        return
    flow = _Flow(split, joined, norms)
    for statement in _statements(method):
        for part in _own_expressions(statement):
            flow.is_split(part)
        for target, value in _assignments(statement):
            if isinstance(target, ast.Name):
                (flow.names.add if flow.is_split(value) else flow.names.discard)(target.id)
    yield from dict.fromkeys(flow.found)


class _Flow:
    """Which expressions are split over the ranks, while statements are read in order."""

    def __init__(
        self, split: frozenset[str], joined: frozenset[str], norms: frozenset[str]
    ) -> None:
        self.split, self.joined, self.norms = split, joined, norms
        self.names: set[str] = set()
        self.found: list[Found] = []

    def is_split(self, node: ast.AST | None) -> bool:
        """Tell whether an expression is split along its last dimension; note reductions in it."""
        if node is None:
            return False
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute):
            whole = self.is_split(node.value)
            return whole and node.attr in ("real", "imag", "data")
        if isinstance(node, ast.Subscript):
            return self.is_split(node.value)
        if isinstance(node, ast.Lambda | ast.Constant):
            return False
        return any([self.is_split(child) for child in ast.iter_child_nodes(node)])

    def _call(self, call: ast.Call) -> bool:
        given = any([self.is_split(a) for a in [*call.args, *(k.value for k in call.keywords)]])
        function = call.func
        name = _called(function)
        on_self = isinstance(function, ast.Attribute) and _is_self(function.value)
        if on_self:
            if name in self.split:
                return True
            if name in self.joined:
                return False
            if name in self.norms and given:
                self._note(call)
            return given
        of_value = isinstance(function, ast.Attribute) and self.is_split(function.value)
        if name in _RESHAPES:
            return False
        if (of_value or given) and name in _NORMS:
            self._note(call)
        if (of_value or given) and name in _REDUCTIONS and _is_over_last(call, of_value):
            self._note(call)
            # What has been noted is not noted again for what is computed from it.
            return name in ("softmax", "log_softmax", "normalize", "cumsum")
        return of_value or given

    def _note(self, call: ast.Call) -> None:
        text = ast.unparse(call)
        self.found.append((text if len(text) <= 60 else text[:57] + "...", call.lineno))


@functools.lru_cache(maxsize=512)
def _parsed(code: CodeType | None) -> ast.FunctionDef | None:
    # Of the code, since a function that is remembered would keep its class alive.
    try:
        lines, first = inspect.getsourcelines(code)  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    node = tree.body[0] if tree.body else None
    if not isinstance(node, ast.FunctionDef):
        return None
    ast.increment_lineno(node, max(first, 1) - 1)
    return node


def _counts_of_self(cls: type) -> dict[str, str]:
    """Return attribute → the count it is, as far as the constructor says so."""
    counts: dict[str, str] = {}
    for method in own_methods(cls):
        if method.name != "__init__":
            continue
        known: dict[str, str] = {}
        for statement in _statements(method):
            for target, value in _assignments(statement):
                read = _count_in(value, known, counts)
                if isinstance(target, ast.Name) and read:
                    known[target.id] = read
                elif isinstance(target, ast.Attribute) and _is_self(target.value):
                    if read:
                        counts[target.attr] = read
                    else:
                        counts[target.attr] = ""
    return counts


def _count_in(node: ast.AST, known: dict[str, str], counts: dict[str, str]) -> str:
    """Return the head count that an expression is made of, "" if it is of none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Div):
        # Heads by groups, or a width by heads: the same on each rank.
        return ""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        if _is_self(node.value) and node.attr in counts:
            return f"self.{node.attr}" if counts[node.attr] else ""
        if node.attr in HEAD_COUNTS:
            return ast.unparse(node)
    if isinstance(node, ast.Call):
        # Of what a method returns (`heads(x)`) nothing is known; its arguments are no part of it.
        return ""
    found = (_count_in(child, known, counts) for child in ast.iter_child_nodes(node))
    return next(filter(None, found), "")


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Return the statements of a function in the order of its text, those in blocks as well."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield from _statements(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    return (node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr))


def _assignments(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Return target and value, of tuples each for itself where both sides are written out."""
    if isinstance(statement, ast.Assign):
        pairs: Iterable[tuple[ast.expr, ast.expr]] = (
            (t, statement.value) for t in statement.targets
        )
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        pairs = ((statement.target, statement.value),)
    elif isinstance(statement, ast.AugAssign):
        both = ast.BinOp(statement.target, statement.op, statement.value)
        pairs = ((statement.target, ast.copy_location(both, statement)),)
    else:
        return
    for target, value in pairs:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, value
        elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield from ((part, value) for part in target.elts)


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    for expression in _own_expressions(statement):
        for node in ast.walk(expression):
            if isinstance(node, ast.Call):
                yield node


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_over_last(call: ast.Call, of_value: bool) -> bool:
    """Tell whether a reduction is over the last dimension, which it says as -1, or over all."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    dim = named.get("dim", named.get("axis"))
    takes_order = _called(call.func) in ("norm", "vector_norm", "topk", "normalize")
    if dim is None:
        place = (0 if of_value else 1) + takes_order
        dim = call.args[place] if len(call.args) > place else None
    if dim is None:
        return _called(call.func) not in ("normalize", "softmax", "log_softmax")
    return "-1" in ast.unparse(dim).replace(" ", "").strip("()[]").split(",")
