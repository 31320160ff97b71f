"""What a session has changed since its statement is refused or told, and never silently lost."""

from __future__ import annotations

import importlib
import py_compile
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from patchlab.errors import ExportError
from tests.ship.cells import USES, export, imported, refused, run

HEAD = "class MyMLP(LlamaMLP):\n"
CHANGED = {
    "a dict": ("    x = {'a': 1}", "MyMLP.x['a'] = 2", "its x is {'a': 2} now"),
    "a list": ("    x = [1]", "MyMLP.x.append(2)", "its x is [1, 2] now"),
    "a set": ("    x = {1}", "MyMLP.x.add(2)", "its x is {1, 2} now"),
    "a list in a dict": ("    x = {'a': [1]}", "MyMLP.x['a'].append(2)", "its x is {'a': [1, 2]}"),
    "an empty dict by call": ("    x = dict()", "MyMLP.x['a'] = 2", "its statement says {}"),
    "a comprehension": ("    x = [i for i in range(2)]", "MyMLP.x.append(2)", "says [0, 1]"),
    "a sum": ("    w = 1\n    x = w + 1", "MyMLP.x = 5", "its statement says 2"),
    "one of two": ("    w, x = 1, 2", "MyMLP.x = 5", "its x is 5 now, and its statement says 2"),
    "one of a branch": ("    if True:\n        x = 2", "MyMLP.x = 5", "its statement says 2"),
    "the second": ("    x = 1\n    x = 2", "MyMLP.x = 5", "its statement says 2"),
    "what the instance has, too": (
        "    x = 1\n    def __init__(self, config):\n        self.x = 2", "MyMLP.x = 5", "says 1"),
    "what is private": ("    pass", "MyMLP._x = 5", "its _x was set after the class statement"),
    "a lambda": ("    x = lambda self: 1", "MyMLP.x = lambda self: 2", "its x was set after"),
    "a property": ("    @property\n    def x(self): return 1",
                   "MyMLP.x = property(lambda self: 2)", "its x was set after"),
    "a static method": ("    @staticmethod\n    def x(): return 1",
                        "MyMLP.x = staticmethod(lambda: 2)", "its x was set after"),
    "in a class inside": ("    class In:\n        x = 1", "MyMLP.In.x = 2", "In: its x is 2"),
    "a default": ("    def forward(self, x, more=[]):\n        return x",
                  "MyMLP.forward.__defaults__[0].append(1)", "the default of more is [1] now"),
    "a default that is no literal": (
        "    def forward(self, x, rate=float('2')):\n        return x",
        "MyMLP.forward.__defaults__ = (3.0,)", "the default of rate is 3.0 now"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_class_with_another_value_than_its_statement_gives_is_refused(loaded_shell, path, case):
    body, after, why = CHANGED[case]

    assert why in refused(loaded_shell, path, HEAD + body, after)


def test_the_same_classes_unchanged_are_exported(loaded_shell, path):
    """Guards the test above."""
    for case, (body, _, _) in CHANGED.items():
        run(loaded_shell, HEAD + body)

        assert export(loaded_shell, path).notes == (), case


@pytest.mark.parametrize("head", ["@kept\nclass MyMLP(LlamaMLP):", "class MyMLP(B, metaclass=M):"])
def test_decorated_classes_and_those_of_a_metaclass_are_compared_too(loaded_shell, path, head):
    cells = [
        "def kept(cls):\n    return cls\nclass M(type):\n    pass\nclass B(LlamaMLP, metaclass=M):"
        "\n    pass",
        f"{head}\n    x = [1]\n    def forward(self, x):\n        return x",
    ]
    run(loaded_shell, *cells)
    assert export(loaded_shell, path).notes == ()
    path.unlink()

    said = refused(loaded_shell, path, "MyMLP.x.append(2)")

    assert "its x is [1, 2] now, and its statement says [1]" in said


STATE = """class MyMLP(LlamaMLP):
    seen = []
    memo = {}
    def forward(self, x, cache={}):
        self.seen.append(x)
        type(self).memo[x] = x
        cache[x] = x
        return x"""


def test_what_a_class_fills_itself_begins_anew_and_is_told(loaded_shell, path):
    run(loaded_shell, STATE, "made = object.__new__(MyMLP)\nMyMLP.forward(made, 1)")

    file = export(loaded_shell, path)

    assert sorted(file.notes) == [
        "cache of MyMLP.forward begins as its statement says.",
        "memo of MyMLP begins as its statement says.",
        "seen of MyMLP begins as its statement says.",
    ]
    assert imported(path).MyMLP.seen == []


def test_value_that_only_running_would_tell_is_told_as_it_was(loaded_shell, path):
    run(
        loaded_shell,
        "def rows():\n    return [1]",
        HEAD + "    x = rows()\n    t = torch.zeros(1)\n    k = len([1])",
        "MyMLP.x.append(2)",
    )

    notes = export(loaded_shell, path).notes

    assert len(notes) == 2
    assert (
        "x of MyMLP is what `rows()` makes where the file is imported; in the session it was "
        "[1, 2]." in notes
    )


def test_global_that_was_changed_has_its_value_of_now(shell, path):
    run(shell, "W = [1]\nT = {'a': W}", USES.format("W.index"), "W.append(2)")

    export(shell, path)

    assert imported(path).W == [1, 2]


# Python modules of the user


SETTINGS = """
SCALE = 1
TABLE = {"a": 1}
FILLED = {}
COUNT = 0


def count():
    global COUNT
    COUNT += 1
    FILLED[COUNT] = 1


class Base:
    rate = 1
    later = 1

    def of(self):
        return 1


Base.later = 2
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_settings.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield importlib.import_module("own_settings")
    del sys.modules["own_settings"]


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "written"
    folder.mkdir()
    return folder / "patches.py"


IMPORTED = "import own_settings\nfrom own_settings import SCALE, TABLE, COUNT, FILLED, Base, count"
READS = "class MyMLP(LlamaMLP):\n    def forward(self, x):\n        return {}"


@pytest.mark.parametrize(
    ("read", "after", "why"),
    [
        ("own_settings.SCALE", "own_settings.SCALE = 3",
         "own_settings.SCALE: it is 3 now, and own_settings says 1"),
        ("own_settings.NEW", "own_settings.NEW = 3", "the file of own_settings has no NEW"),
        ("own_settings.count()", "own_settings.count = lambda: 3", "the session has put its own"),
        ("Base.rate", "Base.rate = 3", "its rate is 3 now, and own_settings says 1"),
        ("Base().of()", "def of(self): return 3\nBase.of = of", "has put its own of into Base of"),
        ("torch.relu_of_mine(x)", "torch.relu_of_mine = lambda x: x", "into torch. Use it by"),
    ],
)  # fmt: skip
def test_change_to_what_is_imported_is_refused(shell, settings, written, read, after, why):
    run(shell, IMPORTED, READS.format(read))
    try:
        assert why in refused(shell, written, after)
    finally:
        vars(torch).pop("relu_of_mine", None)


def test_function_of_the_session_in_a_class_of_a_package_is_refused(shell, path, monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    run(shell, "def forward(self, x): return x")
    forward = shell.user_ns["forward"]

    LlamaMLP.forward = forward
    said = refused(shell, path, USES.format("abs"))
    assert "the session has put its own forward into LlamaMLP of transformers" in said

    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", forward)
    said = refused(shell, path, USES.format("nn.Linear"))
    assert "nn.Linear: the session has put its own forward into Linear of torch" in said


def test_table_that_others_may_fill_is_told_and_not_refused(shell, settings, written):
    run(
        shell, IMPORTED, READS.format("TABLE, FILLED, COUNT, Base.later"), "TABLE['a'] = 3; count()"
    )

    assert export(shell, written).notes == (
        "TABLE is imported: it is {'a': 3} now, and own_settings says {'a': 1}.",
    )


def test_nothing_is_said_of_what_nobody_changed(shell, settings, written):
    """Guards the tests above."""
    run(shell, IMPORTED, READS.format("TABLE, own_settings.SCALE, count(), Base.rate, Base.later"))

    assert export(shell, written).notes == ()


def test_file_that_lost_the_class_since_is_told(shell, settings, written):
    run(shell, IMPORTED, READS.format("Base.rate"))
    Path(settings.__file__).write_text(SETTINGS.replace("Base", "Other"))

    assert "the file of own_settings has no Base" in refused(shell, written)


def test_file_that_was_edited_since_it_was_imported_is_told(shell, settings, written, monkeypatch):
    run(shell, IMPORTED, READS.format("Base.rate"))
    file = Path(settings.__file__)
    py_compile.compile(str(file), settings.__spec__.cached)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert export(shell, written).notes == ()

    file.write_text(SETTINGS.replace("rate = 1", "rate = 25"))

    assert export(shell, written).notes == (
        "own_settings was edited after it was imported here; other processes have the new.",
    )


def test_classes_of_one_name_from_several_modules_are_imported_apart(
    tmp_path, monkeypatch, written
):
    names = ("own_one", "own_two")
    for name in names:
        (tmp_path / f"{name}.py").write_text(
            "from transformers.models.llama.modeling_llama import LlamaMLP\n"
            "class Mine(LlamaMLP):\n    pass\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    one, two = (importlib.import_module(name) for name in names)

    mapping = {"LlamaMLP": one.Mine, "Qwen2MLP": two.Mine}
    patchlab.export_patches(written, mapping, conversions={})

    assert mapping == imported(written).MAPPING
    for name in names:
        del sys.modules[name]


# Where a file can be


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("numpy.py", "would stand in the way of the Python module 'numpy'"),
        ("a\x00b.py", "is no path that a file can have: embedded null byte"),
        ("o" * 300 + ".py", "is no path that a file can have: .*too long"),
    ],
)
def test_path_that_no_patch_file_can_have_is_refused(shell, path, name, why):
    run(shell, USES.format("abs"))

    with pytest.raises(ExportError, match=why):
        export(shell, path.parent / name)

    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["my-patches.py", "class.py"])
def test_name_that_no_import_can_say_is_told(shell, path, name):
    run(shell, USES.format("abs"))

    (note,) = export(shell, path.parent / name).notes

    assert note.startswith(f"no import statement can name the file {name}. Use it with")
    assert export(shell, path).notes == ()
