"""What a notebook defines is exported with the source that it really has, or refused by name."""

from __future__ import annotations

import importlib.util
import itertools
import sys

import pytest
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from patchlab.errors import ExportError
from tests.shells import fresh_shell

IMPORTS = """
import functools, torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
"""
_numbers = itertools.count()


@pytest.fixture
def shell():
    with fresh_shell() as shell:
        shell.run_cell(IMPORTS).raise_error()
        yield shell


@pytest.fixture
def loaded_shell(shell):
    shell.run_cell("%load_ext patchlab").raise_error()
    return shell


def run(shell, *cells):
    for cell in cells:
        shell.run_cell(cell).raise_error()


def export(shell, path, name="MyMLP"):
    return patchlab.export_patches(path, {"LlamaMLP": shell.user_ns[name]}, conversions={})


def imported(path):
    """Run an exported file as a Python module, as another process would."""
    spec = importlib.util.spec_from_file_location(f"exported_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(shell, path, *cells, name="MyMLP"):
    """Run cells, check that the export is refused and leaves no file, and return why."""
    run(shell, *cells)
    with pytest.raises(ExportError) as error:
        export(shell, path, name)
    assert list(path.parent.iterdir()) == []
    return str(error.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "patches.py"


# What is taken along


def test_class_of_a_cell_with_its_comments_and_helpers_of_other_cells(shell, path):
    run(
        shell,
        "LIMIT = 3",
        "def clamp(x):\n    return x.clamp(max=LIMIT)  # from above",
        "# Kept small.\nclass MyMLP(LlamaMLP):\n    def forward(self, x):\n"
        "        # A comment\n        return clamp(super().forward(x))",
    )

    text = export(shell, path).text

    assert "# Kept small.\nclass MyMLP(LlamaMLP):\n" in text
    assert "        # A comment\n" in text
    assert "return x.clamp(max=LIMIT)  # from above\n" in text
    module = imported(path)
    assert module.LIMIT == 3
    assert dict(module.MAPPING) == {"LlamaMLP": module.MyMLP}
    assert issubclass(module.MyMLP, LlamaMLP)
    assert "functools" not in text


def test_class_that_is_defined_again_is_exported_as_it_is_now(shell, path):
    cell = "class MyMLP(LlamaMLP):\n    def version(self):\n        return {}\n"
    run(shell, cell.format(1))
    older = shell.user_ns["MyMLP"]
    run(shell, cell.format(2))

    assert "return 2" in export(shell, path).text
    # The older one, where it is the one that is registered.
    text = patchlab.export_patches(path, {"LlamaMLP": older}, conversions={}).text
    assert "return 1" in text
    assert "return 2" not in text
    note = "Note: MyMLP is the class for key 'LlamaMLP'; the session has defined another MyMLP"
    assert note in text.replace("\n#", "")


def test_redefined_class_without_methods_is_told_by_the_extension(loaded_shell, path):
    run(loaded_shell, "class MyMLP(LlamaMLP):\n    size = 1")
    older = loaded_shell.user_ns["MyMLP"]
    run(loaded_shell, "class MyMLP(LlamaMLP):\n    size = 2")

    assert "size = 2" in export(loaded_shell, path).text
    text = patchlab.export_patches(path, {"LlamaMLP": older}, conversions={}).text
    assert "size = 1" in text


def test_without_the_extension_such_a_class_is_refused_if_there_are_two(shell, path):
    once = "class OnlyOnce(LlamaMLP):\n    size = 1"
    run(shell, once)
    assert "size = 1" in export(shell, path, "OnlyOnce").text
    path.unlink()

    why = refused(
        shell,
        path,
        "class TwiceHere(LlamaMLP):\n    size = 1",
        "class TwiceHere(LlamaMLP):\n    size = 2",
        name="TwiceHere",
    )

    assert "several cells define a class of this name" in why
    assert "%load_ext patchlab" in why


def test_class_of_a_timed_cell_is_exported_with_the_extension(loaded_shell, path):
    run(
        loaded_shell,
        "%%time\ndef twice(x):\n    return 2 * x\n\nclass MyMLP(LlamaMLP):\n"
        "    def forward(self, x):\n        return twice(super().forward(x))",
    )

    export(loaded_shell, path)

    assert imported(path).twice(2) == 4


def test_bases_decorators_defaults_and_class_bodies_come_before_what_needs_them(shell, path):
    run(
        shell,
        "def default():\n    return WIDTH",
        "WIDTH = 7",
        "def named(name):\n    def give(cls):\n        cls.named = name\n        return cls\n"
        "    return give",
        "class Base(LlamaMLP):\n    def last(self):\n        return MyMLP",
        "class Between(Base):\n    width = default()",
        "@named('x')\nclass MyMLP(Between):\n    def __init__(self, config, width=WIDTH):\n"
        "        super().__init__(config)",
    )

    export(shell, path)

    module = imported(path)
    assert (module.MyMLP.width, module.MyMLP.named) == (7, "x")
    assert module.Base.last(None) is module.MyMLP


def test_class_needed_by_a_base_only_when_called_comes_after_what_derives_from_it(shell, path):
    run(
        shell,
        "class Base(LlamaMLP):\n    def other(self):\n        return Grandchild",
        "class MyMLP(Base):\n    pass",
        "class Grandchild(MyMLP):\n    pass",
    )

    export(shell, path)

    assert issubclass(imported(path).Grandchild, imported(path).LlamaMLP)


def test_names_in_annotations_alone_are_taken_if_they_can_be(shell, path):
    run(
        shell,
        "from __future__ import annotations\nfrom collections.abc import Callable as Fn",
        "live = torch.zeros(2)",
        "class Kind: pass",
        "class MyMLP(LlamaMLP):\n    def forward(self, x: Kind, f: Fn | None = None, t: live = 0,"
        " u: Missing = 0) -> 'Kind':\n        return super().forward(x)",
    )

    file = export(shell, path)

    assert "from __future__ import annotations\n" in file.text
    assert "from collections.abc import Callable as Fn\n" in file.text
    assert file.names == ("Kind", "MyMLP")
    imported(path)


def test_aliases_of_modules_functions_and_classes_keep_their_names(shell, path):
    run(
        shell,
        "import torch.nn.functional as F, os.path as osp, xml.etree.ElementTree\n"
        "from torch.nn import Linear as Dense\nfrom math import sqrt as root",
        "def g(x):\n    return F.silu(x)",
        "act = g",
        "class MyMLP(LlamaMLP):\n    def forward(self, x):\n"
        "        return act(x), Dense, root(4), osp.sep, xml.etree.ElementTree.Element",
    )

    text = export(shell, path).text

    for line in (
        "import torch.nn.functional as F",
        "from torch.nn import Linear as Dense",
        "from math import sqrt as root",
        "import os.path as osp",
        "import xml.etree.ElementTree",
        "act = g",
    ):
        assert f"\n{line}\n" in text
    assert len(imported(path).MyMLP.forward(None, sys.modules["torch"].zeros(1))) == 5


def test_nested_class_is_reached_through_the_one_around_it(shell, path):
    run(shell, "class Outer:\n    class MyMLP(LlamaMLP):\n        pass")

    patchlab.export_patches(path, {"LlamaMLP": shell.user_ns["Outer"].MyMLP}, conversions={})

    assert '"LlamaMLP": Outer.MyMLP' in path.read_text()
    assert imported(path).MAPPING["LlamaMLP"].__qualname__ == "Outer.MyMLP"


def test_class_of_a_python_module_is_imported_and_named_in_the_header(
    shell, tmp_path, monkeypatch, path
):
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "layers_of_mine.py").write_text("from torch import nn\nclass Own(nn.Module): pass\n")
    monkeypatch.syspath_prepend(folder)
    run(shell, "from layers_of_mine import Own")

    text = export(shell, path, "Own").text

    assert "It also imports layers_of_mine, which no package installs" in text
    assert "\nfrom layers_of_mine import Own\n" in text
    assert "class Own" not in text
    sys.modules.pop("layers_of_mine")


def test_class_of_a_file_that_no_import_finds_is_written_out(shell, tmp_path, path):
    source = tmp_path / "loaded.py"
    source.write_text(
        "from torch import nn\n\n\nclass Own(nn.Module):\n    def f(self): return nn\n"
    )
    spec = importlib.util.spec_from_file_location("loaded_by_path", source)
    sys.modules["loaded_by_path"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        shell.user_ns["Own"] = module.Own
        text = export(shell, path, "Own").text
    finally:
        del sys.modules["loaded_by_path"]

    assert "class Own(nn.Module):" in text
    assert "loaded_by_path" not in text


def test_name_that_an_annotation_does_without_is_still_refused_where_it_is_used(shell, path):
    said = refused(
        shell,
        path,
        "from __future__ import annotations\nw = torch.zeros(2)",
        "def first(x: w): return second(x)",
        "def second(x): return x + w",
        "class MyMLP(LlamaMLP):\n    def forward(self, x: w):\n        return first(x)",
    )

    assert "\n- w: second uses it: it is a live Tensor" in said


def test_function_that_has_run_often_is_still_known(shell, path):
    """Python rewrites the code of what runs often, in place."""
    run(shell, "def f(x):\n    return x + 1", "for i in range(3000): f(i)", USES.format("f"))

    assert "def f(x):" in export(shell, path).text


# What is refused


LOCAL = """
def make(scale):
    class MyMLP(LlamaMLP):
        def forward(self, x):
            return scale * super().forward(x)
    return MyMLP
MyMLP = make(2)
"""
USES = "class MyMLP(LlamaMLP):\n    def forward(self, x):\n        return {}(x)"


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
        (["p = functools.partial(print)", USES.format("p")], "p", "it is a functools.partial"),
        (["exec('def g(x): return x')", USES.format("g")], "g", "its source is gone"),
        ([USES.format("get_ipython")], "get_ipython", "which is no constant"),
        (["register = 3", USES.format("register")], "register", "needs this name for itself"),
        (
            ["def f(x):\n    return x\nf = torch.no_grad()(f)", USES.format("f")],
            "f",
            "Write the wrapper as a decorator above def f",
        ),
        (["data = list(range(100_000))", USES.format("data")], "data", "which is data"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name(shell, path, cells, name, why):
    said = refused(shell, path, *cells)

    assert f"\n- {name}: " in said
    assert why in said


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (
            "def forward(self, x):\n    return x\nMyMLP.forward = forward",
            "its forward was set after",
        ),
        ("MyMLP.scale = 3", "its scale is 3 now, and its statement says 2"),
        ("LIMIT = 5", "its limit was set from an older LIMIT"),
        ("class Base(LlamaMLP):\n    pass", "it was made from an older Base"),
        ("DEFAULT = 5", "forward: the default of d is 1, and DEFAULT is another now"),
        ("def extra(self):\n    return 1\nMyMLP.more = extra", "its more was set after"),
    ],
)
def test_class_that_is_no_longer_what_its_statement_says_is_refused(loaded_shell, path, after, why):
    said = refused(
        loaded_shell,
        path,
        "LIMIT = 4\nDEFAULT = 1",
        "class Base(LlamaMLP):\n    pass",
        "class MyMLP(Base):\n    scale = 2\n    limit = LIMIT\n"
        "    def forward(self, x, d=DEFAULT):\n        return super().forward(x)",
        after,
    )

    assert why in said


def test_class_that_nothing_has_changed_is_not_taken_for_changed(loaded_shell, path):
    """Guards the test above: the same cells without the last one."""
    run(
        loaded_shell,
        "LIMIT = 4\nDEFAULT = 1",
        "class Base(LlamaMLP):\n    pass",
        "class MyMLP(Base):\n    scale = 2\n    limit = LIMIT\n"
        "    def forward(self, x, d=DEFAULT):\n        return super().forward(x)",
    )

    assert export(loaded_shell, path).names == ("DEFAULT", "LIMIT", "Base", "MyMLP")


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


# The magic


def test_magic_exports_what_is_registered(loaded_shell, path):
    run(loaded_shell, USES.format("abs"), "%patches register LlamaMLP=MyMLP")
    try:
        result = loaded_shell.run_cell(f"%patches export {path}")
        result.raise_error()
        wrong = loaded_shell.run_cell("%patches export")
    finally:
        patchlab.clear_patch_mapping()

    assert result.result.path == path
    assert result.result.keys == ("LlamaMLP",)
    assert "takes one file" in str(wrong.error_in_exec)
