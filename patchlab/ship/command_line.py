"""`python -m patchlab`: run a script under patch files, show what they hold, probe parallelism."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from patchlab.errors import PatchlabError

USAGE = """\
usage: python -m patchlab run --patches FILE [--patches FILE ...] [--quiet] (SCRIPT | -m MODULE) ...
       python -m patchlab status --patches FILE [...]
       python -m patchlab probe-parallel --patches FILE (--config FOLDER_OR_ID | --model-type TYPE)

run             register the patch files, then run the script as if Python had been started with it;
                the same after torchrun and accelerate launch, where every rank is compared
status          show what the patch files register
probe-parallel  compare one process with several ranks on a shrunken model of random weights

A patch file is one that patchlab.export_patches wrote, or any with register() or MAPPING.
Each command has its own options: python -m patchlab COMMAND --help
"""
RUN_USAGE = """\
usage: python -m patchlab run --patches FILE [--patches FILE ...] [--quiet] (SCRIPT | -m MODULE) ...

Register the patch files, then run the script as if Python had been started with it; the same after
torchrun and accelerate launch, where every rank is compared.

  --patches FILE, -p FILE  a patch file; several are registered in order
  --quiet, -q              do not say what is registered
  SCRIPT                   a file, or a folder or archive with a __main__.py
  -m MODULE                a module instead, as for python -m
  ...                      what follows belongs to the script, options too
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 2 for what the user has to mend."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    what, rest = (words[0], words[1:]) if words else ("", [])
    if what in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if what in _COMMANDS and rest[:1] in (["-h"], ["--help"]):
        print(_HELP[what](), end="")
        return 0
    if what not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        said = f"unknown command {what!r}" if what else "no command"
        print(f"patchlab: {said}; there are {known}.\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        result = _COMMANDS[what](rest)
    except PatchlabError as error:
        print(f"patchlab: {error}", file=sys.stderr)
        return 2
    if isinstance(result, int):
        return result
    # Outside of the `except`: an error of patchlab's that the script raises is the script's.
    result()
    return 0


def _run(words: Sequence[str]) -> Callable[[], None]:
    from patchlab.ship.launch import parse, prepare

    return prepare(parse(words))


def _status(words: Sequence[str]) -> int:
    from patchlab.ship.patch_file import register_files
    from patchlab.ship.ranks import rank_status
    from patchlab.verify.status import status

    register_files(_status_arguments().parse_args(words).patches)
    print(rank_status())
    print(status().to_text())
    return 0


def _status_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m patchlab status", description="Show what the patch files register."
    )
    parser.add_argument(
        "--patches", "-p", action="append", required=True, metavar="FILE", help="a patch file"
    )
    return parser


def _probe(words: Sequence[str]) -> int:
    from patchlab.ship.probe_command import main as probe_main

    return probe_main(words)


def _probe_help() -> str:
    from patchlab.ship.probe_command import arguments

    return arguments().format_help()


_HELP: dict[str, Callable[[], str]] = {
    "run": lambda: RUN_USAGE,
    "status": lambda: _status_arguments().format_help(),
    "probe-parallel": _probe_help,
}
_COMMANDS: dict[str, Callable[[Sequence[str]], int | Callable[[], None]]] = {
    "run": _run,
    "status": _status,
    "probe-parallel": _probe,
}
