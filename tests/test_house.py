"""The rules of the house: who may import whom, what an import costs, what is public."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import patchlab

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "patchlab"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ["torch", "transformers", "pandas", "graphviz", "IPython", "ipywidgets", "anywidget"]
JUPYTER = ["IPython", "ipywidgets", "anywidget", "traitlets"]
ENGINE_ROOMS = sorted(
    path.parent.name
    for path in PACKAGE.glob("*/__init__.py")
    if path.parent.name not in ("notebook", "static")
)


def loaded_by(statement: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has loaded after a statement."""
    names = "{name.partition('.')[0] for name in sys.modules}"
    code = f"import sys\n{statement}\nprint(*sorted({names}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_importing_patchlab_loads_nothing_heavy():
    assert loaded_by("import patchlab").isdisjoint(HEAVY)


def test_star_import_is_the_price_of_every_room():
    """Guards the test above: such packages are there once the names are used."""
    assert {"torch", "IPython"} <= loaded_by("from patchlab import *")


@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_engine_room_loads_no_jupyter_and_no_frame_or_graph_package(room):
    modules = [
        f"patchlab.{room}.{path.stem}"
        for path in sorted((PACKAGE / room).glob("*.py"))
        if path.stem != "__init__"
    ]
    statement = f"import {', '.join([f'patchlab.{room}', *modules])}"

    found = loaded_by(statement) & {*JUPYTER, "graphviz", "matplotlib"}

    # Not pandas: where scikit-learn is installed, transformers loads it, and it loads pandas.
    assert not found


@pytest.mark.parametrize("module_name", HEAVY)
def test_probe_can_say_yes(module_name):
    """Guards the tests above, which would pass if the probe were broken."""
    assert module_name in loaded_by(f"import {module_name}")


def test_importing_patchlab_changes_nothing_in_transformers():
    """Neither functions of transformers nor its registry change before something is asked for."""
    code = (
        "import transformers.modeling_utils as m, transformers.monkey_patching as p\n"
        "before = (m.apply_patches, m.patch_output_recorders, p.get_patch_mapping())\n"
        "import patchlab; from patchlab import *\n"
        "after = (m.apply_patches, m.patch_output_recorders, p.get_patch_mapping())\n"
        "assert before == after and not after[2]"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# The public names


def test_every_public_name_is_there_and_documented():
    for name in patchlab.__all__:
        assert getattr(patchlab, name).__doc__, f"patchlab.{name} has no docstring"


def test_dir_shows_every_public_name_before_it_is_loaded():
    code = "import patchlab; print(set(patchlab.__all__) <= set(dir(patchlab)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.strip() == "True"


def test_type_checkers_see_the_same_public_names():
    """The imports under TYPE_CHECKING are all that a type checker or an editor can read."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert seen == set(patchlab.__all__) - {"__version__"}


def test_version_is_the_same_wherever_it_stands():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', project, re.M) == [patchlab.__version__]


def test_all_has_no_repeats():
    assert len(patchlab.__all__) == len(set(patchlab.__all__))


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        patchlab.no_such_name  # noqa: B018


# The import contracts, and that they can fail


def contracts(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the import contracts of a copy of the package."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "patchlab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_hold(copy):
    ran = contracts(copy)
    assert ran.returncode == 0, ran.stdout


BREAKS = {
    "a stray file": ("stray.py", ""),
    "a stray room": ("stray/__init__.py", ""),
    "Jupyter in the engine": ("plan/probe.py", "import IPython"),
    "Jupyter at the bottom": ("errors.py", "import traitlets"),
    "Jupyter in a function": ("apply/probe.py", "def f():\n    import ipywidgets"),
    "a lower room that knows a higher one": ("mapping/probe.py", "import patchlab.plan"),
    "a room that knows the public names": ("mapping/probe.py", "import patchlab.notebook"),
    "neighbors that know each other": ("render/probe.py", "import patchlab._upstream"),
    "the engine that knows the notebook": ("verify/probe.py", "import patchlab.notebook"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_import_contracts_can_fail(copy, case):
    name, source = BREAKS[case]
    path = copy / "patchlab" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n" + source + "\n")

    ran = contracts(copy)

    assert ran.returncode != 0
    assert "BROKEN" in ran.stdout or "not exhaustive" in ran.stdout.lower(), ran.stdout + ran.stderr


# What the files are like


def imported_private_names(path: Path) -> list[str]:
    """Return the private names of transformers that a file imports or reads from its modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aliases = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            found += [a.name for a in node.names if is_private(a.name)]
            aliases |= {a.asname or a.name for a in node.names}
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "transformers":
                    aliases.add(alias.asname or alias.name.split(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                found.append(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_one_file_reads_private_names_of_transformers(path):
    assert path.name == "_upstream.py" or not imported_private_names(path)


def test_private_names_are_seen(tmp_path):
    """Guards the test above."""
    path = tmp_path / "probe.py"
    path.write_text(
        "from transformers.monkey_patching import _monkey_patch_lock\n"
        "import transformers.modeling_utils as m\nm._anything\n"
        "import transformers\ntransformers.utils._other\ntransformers.__version__\n"
    )
    assert imported_private_names(path) == ["_monkey_patch_lock", "_anything", "_other"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_file_holds_one_idea_and_says_which(path):
    source = path.read_text(encoding="utf-8")

    assert ast.get_docstring(ast.parse(source)), "no docstring"
    assert source.count("\n") <= 400, "over 400 lines"
    assert not re.search(r"util|helper|common|core|manager|\bbase\b", path.stem), "no such names"
