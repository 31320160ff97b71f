"""What cannot be exported is refused by name, with the reason, and nothing is written."""

from __future__ import annotations

import pytest

import patchlab
from patchlab.errors import ExportError
from tests.ship.cells import IMPORTS, USES, export, imported, refused, run

LOCAL = """
def make(scale):
    class MyMLP(LlamaMLP):
        def forward(self, x):
            return scale * super().forward(x)
    return MyMLP
MyMLP = make(2)
"""


@pytest.mark.parametrize(
    ("cells", "name", "why"),
    [
        ([LOCAL], "MyMLP", "it was made inside the function make"),
        (["MyMLP = type('MyMLP', (LlamaMLP,), {})"], "MyMLP", "made by type() or by a function"),
        (["f = lambda x: x", USES.format("f")], "f", "it is a lambda"),
        (["w = torch.zeros(2)", USES.format("w.add")], "w", "it is a live Tensor"),
        (["net = nn.Linear(2, 2)", USES.format("net")], "net", "it is a live Linear"),
        (
            ["def outer(k):\n    def inner(x):\n        return k * x\n    return inner\n"
             "scaled = outer(2)", USES.format("scaled")],
            "scaled",
            "made inside the function outer, over whose k it closes",
        ),
        (["lock = __import__('threading').Lock()", USES.format("lock")], "lock", "_thread.lock"),
        ([USES.format("nowhere")], "nowhere", "MyMLP uses it, and there is no such name"),
        (["p = functools.partial(lambda x: x)", USES.format("p")], "p", "it is a lambda"),
        (["p = functools.partial(len)\np.rate = 2", USES.format("p")], "p", "attribute 'rate'"),
        (["k = nn.ReLU().forward", USES.format("k")], "k", "the method forward of an object"),
        (["exec('def g(x): return x')", USES.format("g")], "g", "its source is gone"),
        ([USES.format("get_ipython")], "get_ipython", "method get_ipython of an object"),
        (["register = 3", USES.format("register")], "register", "needs this name for itself"),
        (
            ["def f(x):\n    return x\nf = torch.no_grad()(f)", USES.format("f")],
            "f",
            "Write the wrapper as a decorator above def f",
        ),
        (
            ["@functools.singledispatch\ndef f(x):\n    return x\n"
             "@f.register\ndef _(x: int):\n    return x + 1\n", USES.format("f")],
            "f",
            "whose other branches are registered elsewhere",
        ),
        (["data = list(range(100_000))", USES.format("data")], "data", "which is data"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name(shell, path, cells, name, why):
    said = refused(shell, path, *cells)

    assert f"\n- {name}: " in said
    assert why in said


CHANGED = """class MyMLP(Base):
    scale = 2
    sign = -1.0
    pair = (1, 2)
    share = 1 / 8
    limit = LIMIT
    def forward(self, x, d=DEFAULT):
        return super().forward(x)
    def more(self):
        return 1"""


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (
            "def forward(self, x):\n    return x\nMyMLP.forward = forward",
            "its forward was set after",
        ),
        ("MyMLP.scale = 3", "its scale is 3 now, and its statement says 2"),
        ("MyMLP.sign = -2.0", "its sign is -2.0 now, and its statement says -1.0"),
        ("MyMLP.pair = (1, 3)", "its pair is (1, 3) now, and its statement says (1, 2)"),
        ("MyMLP.share = 0.5", "its share is 0.5 now, and its statement says 0.125"),
        ("MyMLP.rate = 3", "its rate was set after"),
        ("del MyMLP.scale", "its scale was deleted"),
        ("del MyMLP.more", "its more was deleted"),
        ("LIMIT = 5", "its limit was set from an older LIMIT"),
        ("class Base(LlamaMLP):\n    pass", "it was made from an older Base"),
        ("DEFAULT = 5", "forward: the default of d is 1, and DEFAULT is another now"),
        ("def extra(self):\n    return 1\nMyMLP.extra = extra", "its extra was set after"),
    ],
)
def test_class_that_is_no_longer_what_its_statement_says_is_refused(loaded_shell, path, after, why):
    said = refused(
        loaded_shell,
        path,
        "LIMIT = 4\nDEFAULT = 1",
        "class Base(LlamaMLP):\n    pass",
        CHANGED,
        after,
    )

    assert why in said


def test_class_that_nothing_has_changed_is_not_taken_for_changed(loaded_shell, path):
    """Guards the test above: the same cells without the last one."""
    run(
        loaded_shell,
        "LIMIT = 4\nDEFAULT = 1",
        "class Base(LlamaMLP):\n    pass",
        CHANGED,
    )

    assert export(loaded_shell, path).names == ("DEFAULT", "LIMIT", "Base", "MyMLP")


def test_class_of_one_of_two_branches_is_refused(loaded_shell, path):
    branches = "if True:\n    class MyMLP(LlamaMLP):\n        act = nn.GELU()\n"
    branches += "else:\n    class MyMLP(LlamaMLP):\n        act = nn.ReLU()"

    assert "defines it in several branches" in refused(loaded_shell, path, branches)


def test_class_whose_base_has_its_name_is_refused_with_what_helps(shell, path):
    said = refused(shell, path, "class LlamaMLP(LlamaMLP):\n    size = 2", name="LlamaMLP")

    assert "its base has the name that it has itself. Give it a name of its own" in said


def test_count_that_the_class_keeps_itself_begins_anew(shell, path):
    run(
        shell,
        "class MyMLP(LlamaMLP):\n    calls = 0\n    def forward(self, x):\n"
        "        MyMLP.calls += 1\n        return x",
        "MyMLP.forward(None, 1)",
    )
    assert shell.user_ns["MyMLP"].calls == 1

    export(shell, path)

    assert imported(path).MyMLP.calls == 0


def test_function_with_an_attribute_of_its_own_is_refused(shell, path):
    said = refused(shell, path, "def f(x): return x\nf.rate = 2", USES.format("f"))

    assert "was given an attribute 'rate' after its def statement" in said


def test_every_reason_is_given_at_once(shell, path):
    said = refused(
        shell,
        path,
        "f = lambda x: x\nw = torch.zeros(2)",
        "class MyMLP(LlamaMLP):\n    def forward(self, x):\n        return f(x) + w + nowhere",
    )

    assert "3 things cannot be exported" in said
    assert all(f"\n- {name}: " in said for name in ("f", "w", "nowhere"))


def test_two_classes_of_one_name_are_refused(shell, path):
    run(shell, USES.format("abs"))
    older = shell.user_ns["MyMLP"]
    run(shell, USES.format("max"))

    with pytest.raises(ExportError, match=r"another MyMLP is exported .* run the cell"):
        patchlab.export_patches(path, {"A": older, "B": shell.user_ns["MyMLP"]}, conversions={})


def test_class_of_a_script_that_has_changed_since_is_refused(tmp_path, path, shell):
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + USES.format("abs"))
    run(shell, f"%run {script}")
    script.write_text(IMPORTS + "# another line\n" + USES.format("max"))

    with pytest.raises(ExportError, match="is not what it was made from"):
        export(shell, path)
