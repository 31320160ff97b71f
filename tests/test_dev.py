"""`./dev` sets up once, says what is wrong in its own words, and calls the tools that there are."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "dev"


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """The script as a module that takes a folder of its own for the repository."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("dev", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("dev", loader))
    loader.exec_module(module)
    module.ROOT = tmp_path
    module.STATIC = tmp_path / "static"
    (tmp_path / "pyproject.toml").write_text("first")
    for name in ("TORCH", "VENV", "CHROMIUM"):
        monkeypatch.delenv(name, raising=False)
    return module


def call(*arguments, cwd=ROOT, **env):
    command = [sys.executable, str(cwd / "dev"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )


# What is said


def test_help_names_every_command():
    said = call("--help")

    assert said.returncode == 0
    for command in ("lab", "test", "check", "bench", "binder", "frontend"):
        assert f"./dev {command}" in said.stdout


@pytest.mark.parametrize("arguments", [["nonsense"], ["check", "more"], ["frontend", "more"]])
def test_what_cannot_be_done_is_refused_with_the_help(arguments):
    said = call(*arguments)

    assert said.returncode == 1
    assert f"cannot do {' '.join(arguments)!r}" in said.stderr
    assert "./dev lab" in said.stderr


def test_old_python_is_told_apart_before_anything_else_can_fail(dev):
    # So that an old Python gets as far as saying that it is too old.
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 7))

    with pytest.raises(SystemExit, match=r"Python 3\.9 .* needs 3\.10"):
        dev.check_python((3, 9))
    dev.check_python((3, 10))


def test_missing_venv_module_is_told_with_the_package_that_has_it(dev, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    environment = dev.Environment(tmp_path / "venv", dev.LAB)

    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        environment.create()
    assert not (tmp_path / "venv").exists()


def test_set_up_without_a_network_says_what_helps_and_is_not_taken_for_done(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "pyproject.toml").write_text("")

    said = call("check", cwd=tmp_path, PIP_NO_INDEX="1", TORCH="torch==2.13.0", VENV="")

    assert said.returncode == 1
    assert "Without a network" in said.stderr
    assert "Traceback" not in said.stderr
    assert not list((tmp_path / ".venv").glob(".dev-*"))


@pytest.mark.parametrize("version", ["", "new", "5", "5.22; rm"])
def test_version_of_transformers_must_be_one(dev, version):
    with pytest.raises(SystemExit, match=r"such as 5\.22\.2"):
        dev.take_version(["-q", "--transformers", version])


def test_version_of_transformers_is_taken_out_of_pytests_arguments(dev):
    assert dev.take_version(["-q", "--transformers", "5.22.2", "-x"]) == ("5.22.2", ["-q", "-x"])
    assert dev.take_version(["--transformers=5.22.2"]) == ("5.22.2", [])
    assert dev.take_version(["-q"]) == ("", ["-q"])


def test_unknown_benchmark_is_refused_with_those_there_are(dev, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_scopes.py").write_text("")

    with pytest.raises(SystemExit, match="there are: scopes"):
        dev.bench(["scope"])


# Set up once


@pytest.fixture
def ready(dev, tmp_path):
    """An environment for the tests that was set up."""
    environment = dev.Environment(tmp_path / "venv", dev.TEST)
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text("")
    environment.stamp.write_text(environment.wanted())
    assert environment.ready()
    return environment


def test_second_start_installs_nothing(ready, monkeypatch, dev):
    monkeypatch.setattr(dev, "run", lambda *a, **k: pytest.fail("nothing may be run"))

    ready.ensure()


def test_environment_of_the_tests_does_for_the_lab_and_not_the_other_way(ready, dev):
    lab = dev.Environment(ready.folder, dev.LAB)
    assert lab.ready()

    ready.stamp.unlink()
    lab.stamp.write_text(lab.wanted())
    assert lab.ready()
    assert not ready.ready()


def test_change_of_what_is_wanted_installs_again(ready, dev, monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text("second")
    assert not ready.ready()
    (tmp_path / "pyproject.toml").write_text("first")
    assert ready.ready()

    monkeypatch.setenv("TORCH", "torch==2.9.0")
    assert not ready.ready()
    monkeypatch.delenv("TORCH")

    ready.transformers = "5.22.2"
    assert not ready.ready()


def test_environment_that_was_moved_is_set_up_again(ready, dev, tmp_path):
    dev.ROOT = tmp_path / "elsewhere"
    dev.ROOT.mkdir()
    shutil.copy(tmp_path / "pyproject.toml", dev.ROOT)

    assert not ready.ready()


# The bundle


@pytest.fixture
def frontend(dev, tmp_path, monkeypatch):
    """A front end whose build writes one line, and an npm that runs it."""
    (tmp_path / "frontend").mkdir()
    (tmp_path / "frontend" / "package.json").write_text("{}")
    (tmp_path / "static").mkdir()
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f'case "$*" in *build) echo built > {tmp_path}/static/tree.js;; esac\n'
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{os.environ['PATH']}")
    return tmp_path


def test_bundle_that_is_not_the_sources_own_fails_once_and_is_built(dev, frontend):
    (frontend / "static" / "tree.js").write_text("older\n")

    with pytest.raises(SystemExit, match=r"not built from these sources: static/tree\.js"):
        dev.test_frontend()
    dev.test_frontend()

    assert (frontend / "static" / "tree.js").read_text() == "built\n"


def test_file_that_the_build_adds_is_seen_as_well(dev, frontend):
    with pytest.raises(SystemExit, match=r"tree\.js"):
        dev.test_frontend()


def test_front_end_is_installed_as_locked_checked_tested_and_built(dev, frontend):
    (frontend / "static" / "tree.js").write_text("built\n")

    dev.test_frontend()

    calls = (frontend / "calls").read_text().splitlines()
    assert [c.split()[-1] for c in calls] == ["--loglevel=error", "check", "test", "build"]
    assert " ci " in calls[0]


# CI


def test_ci_runs_the_two_commands_a_person_runs():
    path = ROOT / ".ci" / "run"
    source = [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert os.access(path, os.X_OK)
    assert os.access(SCRIPT, os.X_OK)
    assert source == ["set -eu", 'cd "$(dirname "$0")/.."', "./dev check", "./dev test"]
