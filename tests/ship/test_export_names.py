"""The names that a statement needs are those that Python looks up, no more and no fewer."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
from types import CodeType

import pytest

from patchlab.ship.names import used_names
from patchlab.ship.pieces import Piece, ordered_pieces

FILES = [
    "transformers.models.llama.modeling_llama",
    "transformers.core_model_loading",
    "transformers.monkey_patching",
    "patchlab.plan.survey",
    "patchlab.ship.collect",
    "functools",
    "dataclasses",
    "typing",
]


def looked_up(code: CodeType) -> set[str]:
    """The global names that a code object and those in it load."""
    found = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF"):
            found.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= looked_up(constant)
    return found


def bound_in_classes(tree: ast.AST) -> set[str]:
    """Names that a class body may have of its own; `LOAD_NAME` does not tell."""
    return {
        name.id if isinstance(name, ast.Name) else name.name
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for name in ast.walk(cls)
        if isinstance(name, ast.ClassDef | ast.FunctionDef)
        or (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
    }


@pytest.mark.parametrize("module_name", FILES)
def test_names_are_those_that_the_compiled_statement_loads(module_name):
    """For every class and function statement of real files."""
    source = inspect.getsource(importlib.import_module(module_name))
    late = "from __future__ import annotations" in source
    checked = 0
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        text = ast.unparse(node)
        prefix = "from __future__ import annotations\n" if late else ""
        code = compile(prefix + text, "<statement>", "exec", dont_inherit=True)
        uses = used_names(text, late_annotations=late)
        own = {
            node.name,
            "__name__",
            "__file__",
            "__spec__",
            "__doc__",
            "__package__",
            "__annotations__",
        }

        expected = looked_up(code) - own - {"annotations"}
        found = {*uses.now, *uses.later}

        assert found <= expected, node.name
        assert expected - found <= bound_in_classes(node), node.name
        checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("text", "now", "later", "optional"),
    [
        ("class A(Base, metaclass=M):\n    x: T = V", "Base M V", "", "T"),
        ("class A:\n    def f(self, d=D): return [G(i) for i in self.x if i in H]", "D", "G H", ""),
        ("class A:\n    rows = [make(i) for i in N]", "N make range", "", ""),
        ("@deco(K)\ndef f(x: T, *, y=D) -> 'R': return lambda z: z + Q", "D K deco", "Q", "R T"),
        ("def f():\n    n = 1\n    def g():\n        nonlocal n; n += W", "", "W", ""),
        ("def f():\n    global COUNT\n    COUNT += 1", "", "COUNT", ""),
        ("def f():\n    global COUNT\n    COUNT = 1", "", "", "COUNT"),
        ("class A:\n    scale = scale", "", "", "scale"),
        ("class A(B):\n    def f(self): return super().f(__private)", "B", "_A__private super", ""),
        ("def f(x):\n    import math\n    return math.sqrt(x) + f(x)", "", "", ""),
        ("def f(x: Literal['eager'], y: 'dict[str, K]'): pass", "", "", "K Literal dict str"),
        ("def f():\n    try: a()\n    except E as e: print(e)\n    with w() as z: return z", "",
         "E a print w", ""),
        ("def f(m):\n    match m:\n        case P(x=y): return y", "", "P", ""),
        ("def f(a):\n    if (b := a): return b", "", "", ""),
        ("def f():\n    x: T = V\n    return x", "", "V", "T"),
    ],
)  # fmt: skip
def test_when_a_name_is_needed(text, now, later, optional):
    uses = used_names(text, late_annotations=True)

    assert set(uses.now) - {"range"} == set(now.split()) - {"range"}
    assert set(uses.later) == set(later.split())
    assert set(uses.optional) == set(optional.split())


def test_evaluated_annotations_are_needed_when_the_statement_runs():
    uses = used_names("def f(x: T) -> 'R': pass", late_annotations=False)

    assert (uses.now, uses.optional) == (("T",), ("R",))


def test_attribute_chains_are_told_whole():
    uses = used_names("def f(x): return xml.etree.Tree(x).y", late_annotations=False)

    assert ("xml", "etree", "Tree") in uses.chains


def pieces(**needs: str) -> dict[str, Piece]:
    """`name="now / later"` as pieces."""
    made = {}
    for name, text in needs.items():
        now, _, later = text.partition("/")
        made[name] = Piece(name, "class", "", tuple(now.split()), tuple(later.split()))
    return made


@pytest.mark.parametrize(
    ("needs", "order"),
    [
        ({"A": "B", "B": "C", "C": ""}, "C B A"),
        ({"A": "B", "B": "/A"}, "B A"),
        ({"B": "/A", "A": "B"}, "B A"),
        ({"Base": "/Other", "Other": "Child", "Child": "Base"}, "Base Child Other"),
        ({"A": "deco", "deco": "/table", "table": ""}, "table deco A"),
        ({"A": "/B", "B": "/A"}, "B A"),
    ],
)
def test_pieces_come_after_what_they_need_when_they_run(needs, order):
    assert [piece.name for piece in ordered_pieces(pieces(**needs))] == order.split()


def test_builtins_are_builtins():
    """Guards the first test: it would not see a name that Python itself has."""
    uses = used_names("def f(x): return len(x)", late_annotations=False)

    assert uses.later == ("len",)
    assert hasattr(builtins, "len")
