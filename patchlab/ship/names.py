"""Which names a statement takes from the module around it, and when it needs them.

Python's own `symtable` says which names are global, so comprehensions, nested functions, `global`,
`nonlocal`, lambdas and class bodies follow Python's rules and not ours. Annotations are looked at
apart: under `from __future__ import annotations` nothing evaluates them, so a name that stands in
annotations alone is taken along if it is there, and not missed if it is not.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

# What every Python module has of its own.
_OF_THE_MODULE = frozenset(
    {"__name__", "__file__", "__doc__", "__spec__", "__package__", "__loader__", "__builtins__"}
    | {"__annotations__"}
)
_COMPREHENSIONS = frozenset({"listcomp", "setcomp", "dictcomp", "genexpr"})


@dataclass(frozen=True, slots=True)
class Uses:
    """The names that a statement takes from its module, each sorted.

    Attributes:
        now: Needed when the statement runs: bases, decorators, defaults, class bodies.
        later: Needed when what it defines is called.
        optional: In annotations that nothing evaluates, or perhaps a name of the class body.
        chains: Attributes read off a name; "torch.nn.Linear" is `("torch", "nn", "Linear")`.
    """

    now: tuple[str, ...]
    later: tuple[str, ...]
    optional: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]


def used_names(text: str, *, late_annotations: bool) -> Uses:
    """Return what the one statement in a text takes from its module."""
    tree = ast.parse(text)
    optional = set(_annotated_names(list(_annotations(tree))))
    chains = set(_chains(tree))
    counted = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    # Nothing ever evaluates the annotation of a function's variable, and symtable counts it.
    text = ast.unparse(_WithoutLocalAnnotations().visit(tree))
    if late_annotations:
        # symtable knows of the future import only if the text has it.
        text = "from __future__ import annotations\n" + text
    table = symtable.symtable(text, "<statement>", "exec")
    # From Python 3.12 on the variables of a comprehension stand among those of a class body.
    looped = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    found = _Found(set(), set(), optional, counted, looped)
    _collect(table, found, runs_now=True)
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    known = own | _OF_THE_MODULE
    now, later = found.now - known, found.later - found.now - known
    return Uses(
        tuple(sorted(now)),
        tuple(sorted(later)),
        tuple(sorted(optional - now - later - known)),
        tuple(sorted(chains)),
    )


def is_guarded(text: str, name: str) -> bool:
    """Tell whether the one statement in a text reads a name only under a condition, or tries to.

    `if HAS_FLASH: flash_attn_func(...)` runs where there is no such name.
    """
    return all(_reads_guarded(ast.parse(text), name, guarded=False))


def _reads_guarded(node: ast.AST, name: str, *, guarded: bool) -> Iterator[bool]:
    if isinstance(node, ast.Name) and node.id == name:
        yield guarded
    free: list[ast.AST] = []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        free = [node.test]
    elif isinstance(node, ast.BoolOp):
        free = [*node.values[:1]]
    inside = guarded or bool(free) or isinstance(node, ast.Try)
    for inner in ast.iter_child_nodes(node):
        yield from _reads_guarded(inner, name, guarded=guarded if inner in free else inside)
        # What comes after `if not HAS_FLASH: return` is under a condition as well.
        if isinstance(inner, ast.If) and isinstance(
            inner.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break
        ):
            inside = True


@dataclass(frozen=True, slots=True)
class _Found:
    """Sets that `_collect` adds to.

    Attributes:
        counted: The names that `+=` and the like change.
        looped: The variables of comprehensions.
    """

    now: set[str]
    later: set[str]
    optional: set[str]
    counted: set[str]
    looped: set[str]


def _collect(table: symtable.SymbolTable, found: _Found, *, runs_now: bool) -> None:
    for symbol in table.get_symbols():
        name = symbol.get_name()
        needed = symbol.is_referenced() or name in found.counted
        if table.get_type() != "module" and symbol.is_declared_global() and symbol.is_assigned():
            # `global COUNT; COUNT = 0` needs nothing to be there, and `COUNT += 1` does.
            (found.later if needed else found.optional).add(name)
        elif symbol.is_global() and symbol.is_referenced():
            (found.now if runs_now else found.later).add(name)
        elif table.get_type() == "class" and symbol.is_assigned() and needed:
            # `scale = scale` in a class body reads the module's before it has its own.
            found.optional.update({name} - found.looped)
    for child in table.get_children():
        plain_function = child.get_type() == "function" and (
            child.get_name().strip("<>") not in _COMPREHENSIONS
        )
        _collect(child, found, runs_now=runs_now and not plain_function)


class _WithoutLocalAnnotations(ast.NodeTransformer):
    """Takes the annotations of the variables in functions away."""

    def __init__(self) -> None:
        self._in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_inside(node, in_function=True)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_inside(node, in_function=True)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit_inside(node, in_function=False)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if self._in_function:
            node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def _visit_inside(self, node: ast.AST, *, in_function: bool) -> ast.AST:
        outer, self._in_function = self._in_function, in_function
        self.generic_visit(node)
        self._in_function = outer
        return node


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg):
            if node.annotation is not None:
                yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _annotated_names(annotations: list[ast.expr]) -> Iterator[str]:
    waiting: list[ast.AST] = list(annotations)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                waiting.append(ast.parse(node.value.strip(), mode="eval").body)
            except (SyntaxError, ValueError):
                continue
        elif isinstance(node, ast.Subscript) and _last_name(node.value) == "Literal":
            waiting.append(node.value)  # The strings in it are values, and no names.
        else:
            waiting += ast.iter_child_nodes(node)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _chains(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield (inner.id, *reversed(parts))
