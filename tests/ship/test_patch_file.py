"""Patch files: registered once, importable by name, and refused with file and line."""

from __future__ import annotations

import pickle
import sys

import pytest
import transformers

import patchlab
from patchlab.apply.hooks import hook_stands
from patchlab.errors import LaunchError
from patchlab.ship import patch_file
from patchlab.ship.patch_file import parallel_plan_of, register_files, register_patch_file
from tests import toys

BODY = """
from transformers.models.llama.modeling_llama import LlamaMLP


class Mine(LlamaMLP):
    number = 1

"""
MAPPING = BODY + "\nMAPPING = {'LlamaMLP': Mine}\n"
REGISTER = BODY + "\ndef register():\n    import patchlab\n    RUNS.append(1)\n"
REGISTER += "    patchlab.register_patch_mapping({'LlamaMLP': Mine}, overwrite=True)\n\nRUNS = []\n"
# As a file that knows nothing of patchlab may have it.
UPSTREAM = BODY + "\ndef register():\n    from transformers import monkey_patching\n"
UPSTREAM += "    monkey_patching.register_patch_mapping({'LlamaMLP': Mine}, overwrite=True)\n"


@pytest.fixture
def write(tmp_path):
    """Write a patch file; afterwards nothing is registered, imported or on the path."""
    path, modules, read = list(sys.path), set(sys.modules), dict(patch_file._read)

    def write(text, name="mine_of_test.py", folder="."):
        file = tmp_path / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    yield write
    patchlab.clear_patch_mapping()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    patch_file._read.clear()
    patch_file._read.update(read)


def built():
    return type(transformers.LlamaModel._from_config(toys.llama_config()).layers[0].mlp)


@pytest.mark.parametrize("text", [MAPPING, REGISTER, UPSTREAM])
def test_what_a_file_holds_is_registered_and_built(write, text):
    file = register_patch_file(write(text))

    assert file.keys == ("LlamaMLP",)
    assert built() is file.module.Mine
    assert str(file) == "mine_of_test.py: 1 registered"


def test_provenance_names_the_file(write):
    register_patch_file(write(MAPPING))

    (entry,) = patchlab.status().entries
    assert entry.by == "mine_of_test.py"
    assert hook_stands()


def test_file_that_has_not_changed_is_not_run_again(write):
    path = write(REGISTER)

    first, second = register_patch_file(path), register_patch_file(str(path))

    assert first is second
    assert first.module.RUNS == [1]


def test_file_is_registered_again_after_the_registry_was_cleared(write):
    path = write(REGISTER)
    first = register_patch_file(path)
    patchlab.clear_patch_mapping()

    register_patch_file(path)

    assert patchlab.get_patch_mapping() == {"LlamaMLP": first.module.Mine}


@pytest.mark.parametrize("text", [MAPPING, REGISTER, UPSTREAM])
def test_changed_file_takes_the_place_of_what_it_was(write, text):
    old = register_patch_file(write(text))
    new = register_patch_file(write(text.replace("number = 1", "number = 2")))

    assert old.digest != new.digest
    assert patchlab.get_patch_mapping()["LlamaMLP"].number == 2


def test_later_file_wins(write):
    first = write(REGISTER, "first_of_test.py")
    second = write(REGISTER.replace("number = 1", "number = 2"), "second_of_test.py")

    register_files([first, second])

    assert patchlab.get_patch_mapping()["LlamaMLP"].number == 2


def test_class_is_pickled_by_the_name_of_its_file(write):
    file = register_patch_file(write(MAPPING))

    assert pickle.loads(pickle.dumps(file.module.Mine)) is file.module.Mine
    assert file.module.Mine.__module__ == "mine_of_test"


def test_two_files_of_one_name_are_two_modules(write):
    one = register_patch_file(write(MAPPING, folder="a"))
    other = MAPPING.replace("'LlamaMLP'", "'^LlamaMLP$'").replace("number = 1", "number = 2")
    two = register_patch_file(write(other, folder="b"))

    assert one.module is not two.module
    assert pickle.loads(pickle.dumps(two.module.Mine)).number == 2
    assert pickle.loads(pickle.dumps(one.module.Mine)).number == 1


@pytest.mark.parametrize("name", ["json.py", "my-patches.py", "transformers.py"])
def test_file_hides_no_module_that_is_there(write, name):
    before = {name: sys.modules[name] for name in ("json", "transformers")}

    file = register_patch_file(write(MAPPING, name))

    assert {name: sys.modules[name] for name in before} == before
    assert file.module.__name__.isidentifier()
    assert file.module.__name__ != name.removesuffix(".py")


def test_conversions_are_registered_with_the_mapping(write):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from patchlab._upstream import conversion_cache, user_conversions

    name = "a-model-type-of-this-test"
    text = MAPPING + "from transformers.conversion_mapping import WeightRenaming\n"
    text += f"CONVERSIONS = {{{name!r}: [WeightRenaming('a', 'b')]}}\n"
    try:
        file = register_patch_file(write(text))
        (renaming,) = get_checkpoint_conversion_mapping(name)
    finally:
        conversion_cache().pop(name, None)
        user_conversions().discard(name)

    assert file.conversions == (name,)
    assert renaming.target_patterns == ["b"]


def test_plans_of_files_are_merged(write):
    plan = "TP_PLAN = {'a': 'colwise'}\n"
    files = register_files([write(MAPPING + plan), write(REGISTER, "other_of_test.py")])

    assert parallel_plan_of(files) == {"a": "colwise"}


REFUSED = {
    "nothing in it": ("x = 1\n", "has neither a function register"),
    "an empty mapping": ("MAPPING = {}\n", "has registered nothing"),
    "a syntax error": ("x = 1\ny = (\n", r"mine_of_test.py, line 2: '\(' was never closed: y = \("),
    "a null byte": ("x = 1\0", "mine_of_test.py: .*null byte"),
    "an error": ("\n\n1 / 0\n", "line 3: running it failed: ZeroDivisionError"),
    "an error below": (
        "def f():\n    return {}['a']\n\ndef register():\n    f()\n",
        "line 2: registering what it holds failed: KeyError: 'a'",
    ),
    "a class that is none": ("MAPPING = {'LlamaMLP': 3}\n", "failed: MappingTypeError"),
    "a key that is none": (BODY + "MAPPING = {'*MLP': Mine}\n", "failed: MappingError"),
    "conversions that are none": (
        MAPPING + "CONVERSIONS = {'llama': [1]}\n",
        "failed: MappingTypeError: the conversions of 'llama'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_cannot_be_registered_is_named_and_changes_nothing(write, case):
    text, says = REFUSED[case]

    with pytest.raises(LaunchError, match=says):
        register_patch_file(write(text))

    assert patchlab.get_patch_mapping() == {}


def test_file_that_failed_can_be_imported_once_it_is_mended(write):
    with pytest.raises(LaunchError):
        register_patch_file(write("1 / 0\n"))

    register_patch_file(write(MAPPING))

    assert "LlamaMLP" in patchlab.get_patch_mapping()


def test_missing_file_and_folder_are_told(tmp_path):
    with pytest.raises(LaunchError, match=r"no patch file 'nowhere\.py': No such file"):
        register_patch_file("nowhere.py")
    with pytest.raises(LaunchError, match="is a folder"):
        register_patch_file(tmp_path)


def test_interrupt_while_a_file_runs_passes_through(write):
    with pytest.raises(KeyboardInterrupt):
        register_patch_file(write("raise KeyboardInterrupt\n"))

    assert "mine_of_test" not in sys.modules


@pytest.mark.parametrize("name", ["mine_of_test.txt", "mine_of_test"])
def test_file_that_does_not_end_in_py_is_registered(write, name):
    assert register_patch_file(write(MAPPING, name=name)).keys == ("LlamaMLP",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit", "line 1: running it failed: SystemExit"),
        (
            "def register():\n    raise SystemExit",
            "line 2: registering what it holds failed",
        ),
    ],
)
def test_file_that_exits_is_told_and_does_not_end_the_run(write, text, why):
    with pytest.raises(LaunchError, match=why):
        register_patch_file(write(text))
