"""The Binder layout agrees with the project, as far as its files tell without a Docker engine."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
BINDER = ROOT / "binder"
DEV = runpy.run_path(str(ROOT / "dev"), run_name="dev")


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
