"""What a notebook defines is exported with the source that it really has, or refused by name."""

from __future__ import annotations

import importlib.util
import sys

from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from tests.ship.cells import USES, export, imported, refused, run

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
