"""What somebody gets who installs the project elsewhere: from the wheel, from the sdist, no Node.

The other environment takes the heavy packages (torch, transformers, Jupyter) from this one and
patchlab from the wheel alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import nbformat
import pytest

from patchlab.plan.findings import TITLES

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = [
    f"patchlab/notebook/static/{name}"
    for name in ("routing.css", "routing.js", "tree.css", "tree.js")
]

pytestmark = pytest.mark.slow


def run(*command, cwd, **changes):
    """Run a command with nothing on the path but what every system has; return what it says."""
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin", "/sbin"])
    env = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **changes}
    ran = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout


def build(source, folder, *what):
    """Build with the project's own backend, and return the file."""
    code = "import sys; sys.exit(__import__('hatchling.cli').cli.hatchling())"
    run(sys.executable, "-c", code, "build", *what, "-d", folder, cwd=source)
    (built,) = folder.iterdir()
    return built


def contents(wheel):
    """Return name → bytes of what a wheel installs, its own record aside."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("RECORD")]
        return {name: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "-t", "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "-t", "sdist")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, wheel):
    """Another environment with the wheel in it; returns its Python."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    # After the installation, which would otherwise find this environment's own patchlab. Such a
    # line adds a folder and not what its own .pth files name: the sources here stay out of reach.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_wheel_has_all_of_the_package_and_nothing_else(wheel):
    names = set(contents(wheel))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "patchlab").rglob("*.py")}

    assert sources <= names
    assert {"patchlab/py.typed", *BUNDLE} <= names
    assert {f"patchlab/plan/codes/{code}.md" for code in TITLES} <= names
    assert {name.split("/")[0] for name in names} == {
        "patchlab",
        wheel.name.split("-py3")[0] + ".dist-info",
    }
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".map"))]


def test_wheel_is_for_every_system_and_small(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000


def test_sdist_has_what_a_clone_has_and_no_node_modules(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "dev", *BUNDLE} <= names
    assert {"frontend/src/tree.js", "tests/toys.py", "binder/postBuild"} <= names
    assert {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} <= names
    assert not [name for name in names if "node_modules" in name or "__pycache__" in name]


def test_wheel_made_from_the_sdist_is_the_same(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "again").mkdir()

    assert contents(build(source, tmp_path / "again", "-t", "wheel")) == contents(wheel)


def test_node_is_out_of_reach_of_these_builds(tmp_path):
    """Guards the builds above."""
    code = "import shutil; print([*map(shutil.which, ['node', 'npm'])])"

    assert run(sys.executable, "-c", code, cwd=tmp_path) == "[None, None]\n"


def test_installed_package_is_whole(elsewhere, tmp_path):
    code = """
import pathlib, patchlab, patchlab.notebook.tree_widget as w
print(pathlib.Path(patchlab.__file__).parent)
assert [patchlab.explain(code).why for code in patchlab.explain().codes]
assert "export" in str(w.TreeWidget._esm) and "tree" in str(w.TreeWidget._css)
assert all(getattr(patchlab, name) is not None for name in patchlab.__all__)
"""
    said = run(elsewhere, "-c", code, cwd=tmp_path)

    assert Path(said.strip()).is_relative_to(elsewhere.parent.parent)


def test_first_tutorial_runs_from_the_installed_wheel(elsewhere, tmp_path):
    """A kernel of that environment, in a folder with the notebooks and nothing else.

    To the end of its first model: the second, whose weights take half a minute to unpack, runs in
    test_notebooks, and all tutorials run from the wheel in `./dev binder`.
    """
    notebooks = shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    first = nbformat.read(notebooks / "01-first-patch.ipynb", as_version=4)
    end = next(n for n, c in enumerate(first.cells) if c.source.startswith("## A language model"))
    first.cells[end:] = [nbformat.v4.new_code_cell("print(patchlab.__file__)\nassert as_before")]
    nbformat.write(first, notebooks / "first.ipynb")
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    own = {name: str(tmp_path / name) for name in folders} | {"JUPYTER_PLATFORM_DIRS": "0"}
    options = ["--to", "notebook", "--execute", "--stdout", "first.ipynb"]

    said = run(elsewhere, "-m", "nbconvert", *options, cwd=notebooks, **own)

    assert "6 × BertSelfAttention → CountingAttention · restored" in said
    assert str(elsewhere.parent.parent) in said
