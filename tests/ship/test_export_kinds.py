"""What a cell can hold beside classes is written so that another process has the same."""

from __future__ import annotations

import ast

import pytest

from tests.exports import last_json, run_python
from tests.ship.cells import IMPORTS, export, imported, refused, run

# A cell, and what code reads of it. One file holds them all.
KINDS = {
    "new type": ("Uid = typing.NewType('Uid', int)", "Uid(2)"),
    "partial": ("def scaled(k, x):\n    return k * x\ntwice = functools.partial(scaled, 2)",
                "twice(3)"),
    "partial of a library": ("soft = functools.partial(F.softmax, dim=-1)",
                             "float(soft(torch.ones(1)))"),
    "ParamSpec": ("PS = typing.ParamSpec('PS')\ndef kept(f: typing.Callable[PS, int]):\n"
                  "    return f", "kept(3)"),
    "alias with a name in quotes": ("Maybe = typing.Optional['MyMLP']", "len(Maybe.__args__)"),
    "default dict": ("counts = collections.defaultdict(int, a=1)", "counts['a'] + counts['z']"),
    "ordered dict": ("order = collections.OrderedDict(b=1, a=2)", "list(order)"),
    "counter": ("letters = collections.Counter('aab')", "letters['a']"),
    "deque": ("last = collections.deque([1, 2, 3], maxlen=2)", "[*last, last.maxlen]"),
    "named tuple": ("class Pair(typing.NamedTuple):\n    a: int\n    b: int = 3\npair = Pair(1)",
                    "pair.b"),
    "named tuple by call": ("Point = collections.namedtuple('Point', 'x y', defaults=[2])\n"
                            "point = Point(1)", "point.y"),
    "enumeration": ("class Kind(enum.Enum):\n    A = 'a'\nkind = Kind.A", "kind.value"),
    "typed dict": ("class Row(typing.TypedDict):\n    a: int", "Row(a=1)"),
    "namespace": ("options = types.SimpleNamespace(rate=0.5)", "options.rate"),
    "read-only dict": ("fixed = types.MappingProxyType({'a': 1})", "fixed['a']"),
    "time": ("pause = datetime.timedelta(seconds=2)", "pause.seconds"),
    "fraction": ("half = fractions.Fraction(1, 2)", "float(half)"),
    "getter": ("second = operator.itemgetter(1)", "second([1, 2])"),
    "limits": ("limits = torch.finfo(torch.bfloat16)", "limits.bits"),
    "numpy scalar": ("np_rate = np.float32(0.1)", "float(np_rate)"),
    "numpy array": ("np_rows = np.arange(4, dtype='int8').reshape(2, 2)", "np_rows.tolist()"),
    "numpy type": ("np_type = np.dtype('float16')", "np_type.itemsize"),
    "method of a class": ("times = torch.Tensor.mul", "float(times(torch.ones(1), 2))"),
    "operator of torch": ("add = torch.ops.aten.add", "float(add(torch.ones(1), 2))"),
    "class method": ("class Made:\n    @classmethod\n    def one(cls):\n        return 1\n"
                     "    @staticmethod\n    def two():\n        return 2\n"
                     "    class Inner:\n        three = 3\n"
                     "one = Made.one\ntwo = Made.two\nInner = Made.Inner",
                     "[one(), two(), Inner.three]"),
    "sentinel": ("MISSING = object()\ndef given(x=MISSING):\n    return x is MISSING", "given()"),
    "wrapper": ("def plus(f):\n    @functools.wraps(f)\n    def more(*words):\n"
                "        return f(*words) + 1\n    return more\n@plus\ndef plain(x):\n"
                "    return x", "plain(2)"),
    "fallback": ("try:\n    import nowhere_at_all\nexcept ImportError:\n    nowhere_at_all = None",
                 "nowhere_at_all is None"),
    "branch": ("if sys.version_info >= (3, 8):\n    LEVEL = 8\nelse:\n    LEVEL = 7", "LEVEL"),
    "branch of functions": ("if torch.cuda.is_available() is None:\n    def where(): return 0\n"
                            "else:\n    def where(): return 1", "where()"),
}  # fmt: skip
MODULES = (
    "import collections, datetime, enum, fractions, functools, operator, sys, types, typing\n"
    "import numpy as np, torch.nn.functional as F"
)
READ = """
import json, patches
print(json.dumps(patches.MyMLP.values()))
"""


def test_kinds_of_values_are_the_same_in_another_process(shell, path):
    run(shell, MODULES, *(cell for cell, _ in KINDS.values()))
    items = ",\n            ".join(code for _, code in KINDS.values())
    run(
        shell,
        "class MyMLP(LlamaMLP):\n    @staticmethod\n    def values():\n        return [\n"
        f"            {items},\n        ]",
    )
    here = shell.user_ns["MyMLP"].values()

    export(shell, path)
    there = last_json(run_python("-c", READ, cwd=path.parent))

    assert dict(zip(KINDS, there, strict=True)) == dict(zip(KINDS, here, strict=True))
    assert len(here) == len(KINDS)


@pytest.mark.parametrize(
    "cell",
    [
        "import math as F, os.path as osp\n{}        return F.sqrt(4) * len(osp.join('a', 'b'))",
        "import functools\ndef plus(f):\n    @functools.wraps(f)\n    def more(*words):\n"
        "        return f(*words) + 1\n    return more\n{}        return plus(abs)(x)",
        "import numpy as np; k = 2\n{}        return np.add(x, k)",
    ],
    ids=["several on a line", "a decorator", "one after another"],
)
def test_cell_that_imports_what_its_functions_use_is_exported(shell, path, cell):
    """IPython compiles its statements apart, which gives them other code than a file has."""
    run(shell, cell.format("class MyMLP(LlamaMLP):\n    @staticmethod\n    def of(x):\n"))

    export(shell, path)

    assert imported(path).MyMLP.of(3) == shell.user_ns["MyMLP"].of(3)


def test_same_cell_in_a_file_is_exported(tmp_path, path, shell):
    """Guards the test above: a file is compiled as a whole."""
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + "class MyMLP(LlamaMLP):\n    def of(self):\n"
                      "        return functools.partial(torch.ones, 2)")  # fmt: skip
    run(shell, f"%run {script}")

    assert "functools.partial(torch.ones, 2)" in export(shell, path).text


GUARDED = {
    "if": "        if HAS:\n            x = flash(x)\n        return x",
    "early return": "        if not HAS:\n            return x\n        return flash(x)",
    "and": "        return HAS and flash(x) or x",
    "one line": "        return flash(x) if HAS else x",
    "try": "        try:\n            x = flash(x)\n        except NameError:\n            pass\n"
    "        return x",
}


@pytest.mark.parametrize("how", GUARDED)
def test_name_that_is_missing_under_a_condition_is_told_and_not_refused(shell, path, how):
    run(
        shell,
        "try:\n    from nowhere_at_all import flash\n    HAS = True\n"
        "except ImportError:\n    HAS = False",
        f"class MyMLP(LlamaMLP):\n    @staticmethod\n    def of(x):\n{GUARDED[how]}",
    )

    file = export(shell, path)

    note = "MyMLP uses flash under a condition; the session has no flash, nor has this file."
    assert file.notes == (note,)
    assert note in file.to_table().footer
    assert "# Note: MyMLP uses flash under a condition" in file.text
    assert imported(path).MyMLP.of(3) == 3


@pytest.mark.parametrize(
    "body",
    [
        "        return flash(x)",
        "        if flash(x):\n            return x",
        "        if HAS:\n            x = flash(x)\n        return flash(x)",
        "        return flash and x",
    ],
)
def test_name_that_is_missing_without_a_condition_is_refused(shell, path, body):
    said = refused(
        shell, path, "HAS = False", f"class MyMLP(LlamaMLP):\n    def of(self, x):\n{body}"
    )

    assert "flash: MyMLP uses it, and there is no such name" in said


def test_constants_of_the_file_are_python(shell, path):
    """Each is one statement, so that a reader sees what it is."""
    run(shell, MODULES, *(cell for cell, _ in KINDS.values()))
    run(shell, "class MyMLP(LlamaMLP):\n    def of(self):\n        return twice, np_rows, one")

    tree = ast.parse(export(shell, path).text)

    written = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    assert written["twice"] == "partial(scaled, 2)"
    assert written["np_rows"] == "numpy.array([[0, 1], [2, 3]], dtype='int8')"
    assert written["one"] == "Made.one"
