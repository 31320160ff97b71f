"""The Binder layout: what its files say, and what repo2docker itself makes of them.

No Docker engine is needed for that. `./dev binder` goes further: it fills an environment from the
files and runs the tutorials in it, which takes minutes.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from benchmarks import binder_simulation as simulation

ROOT = Path(__file__).resolve().parent.parent
BINDER = ROOT / "binder"
DEV = runpy.run_path(str(ROOT / "dev"), run_name="dev")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own imports warn of each other
    from repo2docker.app import Repo2Docker


def lines(name):
    """Return the lines of a file that say something."""
    text = (BINDER / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pyproject(pattern):
    """Return what a pattern finds in pyproject.toml; tomllib is not there on Python 3.10."""
    return re.search(pattern, (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_script_is_executable_bash(name):
    path = BINDER / name

    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith("#!/bin/bash\n")
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


def test_start_runs_what_it_is_given_with_one_thread():
    command = [str(BINDER / "start"), "bash", "-c", 'echo "$OMP_NUM_THREADS $0 $1"', "a b", "c"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "1 a b c\n"


def test_requirements_are_the_projects_own_without_the_heavy_ones():
    dependencies = re.findall(r'"(.+?)"', pyproject(r"\ndependencies = \[(.+?)\n\]"))
    required = lines("requirements.txt")

    assert set(required) <= set(dependencies)
    assert {Requirement(r).name for r in required}.isdisjoint({"torch", "transformers"})


def test_python_is_one_that_the_project_runs_on():
    (runtime,) = lines("runtime.txt")
    version = runtime.removeprefix("python-")

    assert version in SpecifierSet(pyproject(r'requires-python = "(.+?)"'))


def test_torch_comes_before_the_project_and_the_models_are_those_of_the_set_up():
    script = lines("postBuild")
    at = {
        word: next(i for i, line in enumerate(script) if word in line)
        for word in ("set -euo pipefail", DEV["TORCH"], ".[lab,demo]", *DEV["MODELS"])
    }

    assert list(at.values()) == sorted(at.values())
    assert "--torch-backend cpu" in script[at[DEV["TORCH"]]]
    assert "--no-deps" in script[at[DEV["MODELS"][0]]]


def test_graphviz_is_there_to_render_with():
    assert lines("apt.txt") == ["graphviz"]


# What repo2docker makes of it


def build_pack(folder):
    """Return the build pack that repo2docker chooses for a folder."""
    app = Repo2Docker()
    before = Path.cwd()
    os.chdir(folder)
    try:
        for kind in app.buildpacks:
            pack = kind(app.base_image)
            pack.platform = "linux/amd64"
            if pack.detect():
                # What it reads, it reads from where it stands, and some of it only once.
                return (
                    pack,
                    pack.python_version,
                    pack.render({"NB_UID": "1000", "NB_USER": "jovyan"}),
                )
    finally:
        os.chdir(before)
    raise AssertionError("no build pack")


@pytest.fixture(scope="module")
def built():
    return build_pack(ROOT)


def test_repo2docker_takes_the_folder_for_a_python_repository(built):
    pack, version, _ = built

    assert type(pack).__name__ == "PythonBuildPack"
    assert pack.binder_dir == "binder"
    assert version == lines("runtime.txt")[0].removeprefix("python-")


def test_image_is_built_in_the_order_that_keeps_cuda_out(built):
    _, _, dockerfile = built
    steps = [
        "install --yes --no-install-recommends graphviz",
        'pip install --no-cache-dir -r "binder/requirements.txt"',
        "RUN ./binder/postBuild",
        'R2D_ENTRYPOINT="${REPO_DIR}/binder/start"',
    ]
    at = [dockerfile.find(step) for step in steps]

    assert -1 not in at
    assert at == sorted(at)


def test_nothing_else_installs_torch_or_the_project(built):
    """A setup file in the root or torch among the requirements would bring the default wheel."""
    _, _, dockerfile = built

    assert not re.search(r"pip install[^\n]*(torch|transformers|\s\.)", dockerfile)


def test_repo2docker_can_choose_otherwise(tmp_path):
    """Guards the tests above."""
    (tmp_path / "environment.yml").write_text("dependencies: [python=3.12]")

    pack, version, dockerfile = build_pack(tmp_path)

    assert type(pack).__name__ == "CondaBuildPack"
    assert version == "3.12"
    assert "binder/postBuild" not in dockerfile


# The simulation


def test_simulation_runs_the_lines_of_the_script_that_binder_runs():
    ran = simulation.commands(BINDER / "postBuild")

    assert [line for line in lines("postBuild") if not line.startswith("set ")] == ran
    assert sum("--torch-backend" in line for line in ran) == 1
    assert not [line for line in ran if "--system" in line], "this would reach other environments"


@pytest.mark.parametrize(
    ("name", "cuda"),
    [("nvidia-cublas-cu12", True), ("triton", True), ("torch", False), ("nvitop", False)],
)
def test_simulation_knows_what_is_for_cuda(name, cuda):
    assert bool(simulation.CUDA.match(name)) is cuda


def test_simulation_adds_up_a_process_and_its_children():
    code = "import sys, subprocess; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        while len(family := simulation.family(process.pid)) < 2:
            assert process.poll() is None
        total = sum(map(simulation.resident, family))
        process.stdin.close()

    assert total > simulation.resident(os.getpid()) / 1000 > 0
    assert simulation.resident(process.pid) == 0


def test_simulation_stops_a_tutorial_above_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "LIMIT", 1_000_000)
    shutil.copy(ROOT / "notebooks" / "03-tree-and-diff.ipynb", tmp_path)
    notebook = tmp_path / "03-tree-and-diff.ipynb"

    done = simulation.run_tutorial(Path(sys.executable), notebook, tmp_path, os.getpid())

    assert done.problem.startswith("stopped above")
    assert done.peak > 1_000_000
