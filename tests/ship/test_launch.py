"""`python -m patchlab run`: a script finds what it would find without, and the patches as well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import patchlab
from patchlab.errors import LaunchError
from patchlab.ship import launch
from patchlab.ship.command_line import main
from patchlab.ship.launch import Command, parse
from patchlab.ship.probe_command import arguments

ROOT = Path(__file__).resolve().parents[2]
PATCHES = """
from torch import nn


class Mine(nn.Module):
    pass


MAPPING = {"LlamaMLP": Mine}
"""
SCRIPT = """
import json, sys
import beside

monkey_patching = sys.modules.get("transformers.monkey_patching")

if __name__ == "__main__":
    facts = {
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "package": __package__, "spec": __spec__ and __spec__.name, "names": sorted(vars()),
        "main": sys.modules["__main__"].__dict__ is globals(), "beside": beside.__file__,
    }
    registered = monkey_patching.get_patch_mapping() if monkey_patching else {}
    print(json.dumps([facts, {key: cls.__module__ for key, cls in registered.items()}]))
"""
ENDS = """
import atexit, sys

def f(how):
    if how == "error":
        import patchlab
        patchlab.unregister_patch_mapping("nothing")
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit(7)

atexit.register(print, "at exit", __name__, sys.modules["__main__"].f is f)
f(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name, text in {
        "facts.py": SCRIPT,
        "ends.py": ENDS,
        "broken.py": "x = 1\ny = (\n",
        "beside.py": "",
    }.items():
        (scripts / name).write_text(text)
    (tmp_path / "patches.py").write_text(PATCHES)
    return tmp_path


class Runs:
    """Processes that run side by side, each with what it has written."""

    def __init__(self, folder):
        self.folder = folder
        self.started = {}

    def start(self, name, *words):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.started[name] = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __getitem__(self, name):
        process = self.started[name]
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


RUN = ("-m", "patchlab", "run", "--patches", "patches.py")


def test_script_finds_what_it_finds_without_patchlab_and_the_patches(folder):
    (folder / "more.py").write_text(PATCHES.replace("LlamaMLP", "^LlamaAttention$"))
    words = ("scripts/facts.py", "--lr", "1", "--", "-m", "--patches", "x")
    runs = Runs(folder)
    runs.start("with", *RUN, "--patches=more.py", *words)
    runs.start("without", *words)

    status, out, err = runs["with"]
    facts, registered = json.loads(out)
    plain, _ = json.loads(runs["without"][1])

    assert status == 0
    assert facts["argv"] == list(words)
    assert without_dunders(facts) == without_dunders(plain)
    assert registered == {"LlamaMLP": "patches", "^LlamaAttention$": "more"}
    first, *others = err.splitlines()
    said = "patchlab: rank 0 of 1 · 2 registered (LlamaMLP and ^LlamaAttention$) · "
    assert first.startswith(said)
    assert others == []


def test_module_finds_what_it_finds_without_patchlab(folder):
    words = ("-m", "scripts.facts", "a", "-b")
    (folder / "beside.py").write_text("")
    runs = Runs(folder)
    runs.start("with", *RUN, "--quiet", *words)
    runs.start("without", *words)

    status, out, err = runs["with"]
    facts, registered = json.loads(out)

    assert (status, err) == (0, "")
    assert without_dunders(facts) == without_dunders(json.loads(runs["without"][1])[0])
    assert registered == {"LlamaMLP": "patches"}


def without_dunders(facts):
    """Which of its own names Python gives a script depends on its version, and on how it began."""
    own = {"__cached__", "__annotations__", "__annotate__", "__conditional_annotations__"}
    return facts | {"names": [name for name in facts["names"] if name not in own]}


def test_process_ends_as_its_script_does(folder):
    """Exit status, signal, what runs at exit, and a traceback that begins in the script."""
    file = folder / "scripts" / "ends.py"
    runs = Runs(folder)
    for how in ("error", "interrupt"):
        runs.start(how, *RUN, "-q", "scripts/ends.py", how)

    # An error of patchlab's that a script raises is the script's, with its traceback.
    status, out, err = runs["error"]
    assert (status, out) == (1, "at exit __main__ True\n")
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{file}", line 13, in <module>'
    assert lines[-1].startswith("patchlab.errors.MappingError: Key 'nothing' is not registered")
    assert "launch.py" not in err

    status, out, err = runs["interrupt"]
    assert (status, out) == (-signal.SIGINT, "at exit __main__ True\n")
    assert err.endswith("KeyboardInterrupt\n")

    runs.start("status", *RUN, "-q", "scripts/ends.py", "status")
    runs.start("broken", *RUN, "-q", "scripts/broken.py")
    assert runs["status"][0::2] == (7, "")
    status, _, err = runs["broken"]
    assert status == 1
    assert err.splitlines()[0] == f'  File "{folder / "scripts" / "broken.py"}", line 2'


SPAWNS = """
import multiprocessing, os, signal, sys
from patchlab.ship.workers import register_file

def keys(word):
    import patchlab
    return word, __name__, list(patchlab.get_patch_mapping())

if __name__ == "__main__":
    word = sys.stdin.readline().strip()
    with multiprocessing.get_context("spawn").Pool(1, register_file, ["patches.py"]) as pool:
        print(pool.apply(keys, [word]), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_script_reads_standard_input_spawns_workers_and_takes_signals(folder):
    """A worker imports the script as its main module, and does not run it again."""
    (folder / "spawns.py").write_text(SPAWNS)
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    ran = subprocess.run(
        [sys.executable, *RUN, "-q", "spawns.py"],
        cwd=folder, env=env, input="given\n", capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert ran.stdout == "('given', '__mp_main__', ['LlamaMLP'])\n", ran.stderr
    assert ran.returncode == -signal.SIGTERM


# The arguments


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--patches", "p.py", "s.py"], Command(("p.py",), "s.py")),
        (["--patches=p.py", "-p", "q.py", "s.py"], Command(("p.py", "q.py"), "s.py")),
        (["-p", "p.py", "-q", "s.py", "-q"], Command(("p.py",), "s.py", ("-q",), quiet=True)),
        (["-p", "p", "s", "--", "-m", "x"], Command(("p",), "s", ("--", "-m", "x"))),
        (["-p", "p", "--", "-s.py", "a"], Command(("p",), "-s.py", ("a",))),
        (["-p", "p", "-m", "a.b", "-m"], Command(("p",), "a.b", ("-m",), is_module=True)),
    ],
)
def test_arguments_after_the_script_are_its_own(words, command):
    assert parse(words) == command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no patch file is given"),
        (["s.py"], "no patch file is given"),
        (["-p", "p.py"], "no script is given"),
        (["-p"], "-p needs a file"),
        (["-p", "p.py", "-m"], "-m needs the name"),
        (["-p", "p.py", "--lr", "s.py"], "unknown option '--lr' before the script"),
    ],
)
def test_arguments_that_make_no_command_are_told(words, says):
    with pytest.raises(LaunchError, match=says):
        parse(words)


def test_commands_of_the_readme_are_understood():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [
        line.partition("-m patchlab ")[2].split()
        for line in readme.splitlines()
        if "-m patchlab " in line and not line.startswith("|")
    ]

    assert sorted({what for what, *_ in commands}) == ["probe-parallel", "run"]
    for what, *words in commands:
        if what == "run":
            command = parse(words)
            assert command.patches == ("patches.py",)
            assert command.target in ("train.py", "package.train")
        else:
            assert arguments().parse_args(words).ranks == 2


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "no command"),
        (["walk"], 2, "unknown command 'walk'; there are run, status, probe-parallel"),
        (["run", "-p", "nowhere.py", __file__], 2, "no patch file 'nowhere.py'"),
        (["run", "-p", __file__, "nowhere.py"], 2, "can't open script 'nowhere.py'"),
        (["run", "-p", __file__, "-"], 2, "not read from standard input"),
        (["run", "-p", __file__, "-m", "no_such.module"], 2, "no module named 'no_such.module'"),
        (["run", "-p", __file__, "-m", "json.nothing"], 2, "no module named 'json.nothing'"),
        (["status", "-p", "nowhere.py"], 2, "no patch file 'nowhere.py'"),
        (["probe-parallel", "-p", "x", "--model-type", "nothing"], 2, "no model type 'nothing'"),
        (["--help"], 0, "usage: python -m patchlab run"),
        (["run", "--help"], 0, "--quiet, -q"),
        (["status", "-h"], 0, "Show what the patch files register"),
        (["probe-parallel", "--help"], 0, "--as-it-is"),
    ],
)
def test_what_the_user_has_to_mend_is_said_in_a_line(capsys, words, status, says):
    assert main(words) == status
    shown = capsys.readouterr()
    assert says in shown.out + shown.err
    assert "Traceback" not in shown.err


def test_help_of_the_probe_says_something_of_each_of_its_options(capsys):
    assert main(["probe-parallel", "--help"]) == 0

    shown = capsys.readouterr().out
    options = [action for action in arguments()._actions if action.option_strings]
    assert len(options) == 10
    assert all(action.option_strings[0] in shown and action.help for action in options)


class Misspelled(nn.Module):
    pass


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (1, 0)])
def test_key_that_is_the_name_of_no_class_is_told_by_the_first_rank(
    monkeypatch, capsys, rank, told
):
    monkeypatch.setenv("RANK", str(rank))
    patchlab.register_patch_mapping(
        {"LlamaMPL": Misspelled, "LlamaMLP": Misspelled, "Zamba.*MLP$": Misspelled}
    )
    try:
        launch._say_what_is_registered()
    finally:
        patchlab.clear_patch_mapping()

    err = capsys.readouterr().err
    assert err.count("3 registered") == 1
    assert err.count("PL104 ") == told
    assert err.count("warning: PL104 key that replaces nothing: key 'LlamaMPL'") == told
    assert err.count("Did you mean 'LlamaMLP'?") == told


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_misspelled_key_is_told_before_the_script_unless_it_is_to_be_quiet(tmp_path, options):
    text = PATCHES.replace("LlamaMLP", "LlamaMPL")
    assert "MPL" in text
    (tmp_path / "patches.py").write_text(text)
    (tmp_path / "train.py").write_text("import sys; print('begun', file=sys.stderr)")
    words = [sys.executable, "-m", "patchlab", "run", *options, "-p", "patches.py", "train.py"]

    ran = subprocess.run(
        words,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )

    before, _, after = ran.stderr.partition("begun")
    assert ("PL104" in before, "PL104" in after) == (not options, False)
