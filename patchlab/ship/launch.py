"""`python -m patchlab run`: the same patches in every process that a launcher starts.

    python -m patchlab run --patches patches.py train.py --lr 1e-4
    torchrun --nproc-per-node 2 -m patchlab run --patches patches.py train.py --lr 1e-4
    accelerate launch -m patchlab run --patches patches.py -m package.train

The patch files are registered first, then the script runs as `__main__`, as if Python had been
started with it: its arguments, its folder on `sys.path`, its exit status, its tracebacks. What it
builds with `from_pretrained` and `from_config` is patched; processes that it spawns begin with an
empty registry, as always.

Each rank says in one line what it has registered, and the first one which keys are the name of no
class of transformers. Ranks that differ are an error: before the script begins, where the launcher
has a store for that (torchrun and what is built on it), else when the script initializes its
process group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from patchlab.apply.hooks import hold
from patchlab.errors import CatalogError, LaunchError
from patchlab.mapping.registry import registered_mapping
from patchlab.plan.dead_keys import unknown_key_findings
from patchlab.plan.explain import finding_lines
from patchlab.ship.patch_file import register_files, without_frames
from patchlab.ship.ranks import (
    RankStatus,
    check_ranks,
    check_ranks_of_agent,
    checked_when_initialized,
    rank_status,
)

__all__ = ["Command", "RankStatus", "check_ranks", "parse", "prepare"]

_HOLDER = "python -m patchlab run"
_PACKAGE = str(Path(__file__).parent.parent) + os.sep


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, under which patch files.

    Attributes:
        patches: The patch files, in order.
        target: The script, or the name of the module.
        arguments: What comes after it, as the script finds it in `sys.argv[1:]`.
        is_module: Whether `target` names a module, as after `-m`.
        quiet: Whether the lines that say what is registered are left out.
    """

    patches: tuple[str, ...]
    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    quiet: bool = False


def prepare(command: Command) -> Callable[[], None]:
    """Register the patch files in this process, compare the ranks, and return what runs the script.

    What is returned changes the process for good, as starting Python with the script would:
    `sys.argv`, `sys.path`, `__main__`. What the script raises passes through, `SystemExit` and
    `KeyboardInterrupt` as well; where Python prints a traceback of it, that begins in the script.

    Args:
        command: What to run.

    Raises:
        LaunchError: A patch file cannot be registered, there is no such script or module, or the
            ranks have different patches.
    """
    _check_target(command)
    register_files(command.patches)
    # Also where a file has called transformers' own registry: by the hook, its classes are replaced
    # in dispatch dicts, too.
    hold(_HOLDER)
    if not command.quiet:
        _say_what_is_registered()
    # Ranks that a launcher's store has shown to be equal need not be compared again.
    checked = check_ranks_of_agent() is not None

    def start() -> None:
        watched = contextlib.nullcontext() if checked else checked_when_initialized()
        with watched, _own_traceback():
            _run_target(command)

    return start


def _say_what_is_registered() -> None:
    own = rank_status()
    lines = [str(own)]
    # Keys are the same in all ranks, or the ranks are refused; one of them says what is wrong.
    if own.rank == 0:
        with contextlib.suppress(CatalogError):
            lines += finding_lines(
                unknown_key_findings(registered_mapping(), progress=False), severity=True
            )
    print(*(f"patchlab: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


def _check_target(command: Command) -> None:
    if not command.is_module:
        if command.target == "-":
            raise LaunchError(
                "a script is not read from standard input. Save it, and give its file."
            )
        if not Path(command.target).exists():
            raise LaunchError(f"can't open script {command.target!r}: there is no such file.")
        return
    try:
        found = importlib.util.find_spec(command.target)
    except (ImportError, ValueError, AttributeError) as error:
        raise LaunchError(f"no module named {command.target!r}: {error}") from error
    if found is None:
        raise LaunchError(f"no module named {command.target!r}; sys.path is {sys.path!r}.")


def _run_target(command: Command) -> None:
    sys.argv[:] = [command.target, *command.arguments]
    if command.is_module:
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    path = Path(command.target)
    is_packed = path.is_dir() or zipfile.is_zipfile(path)
    # `python -m` has put the current folder first; a script has its own there. With -P (or
    # PYTHONSAFEPATH) neither is.
    if not getattr(sys.flags, "safe_path", False) and sys.path[:1] in ([""], [str(Path.cwd())]):
        sys.path[:1] = [] if is_packed else [str(path.resolve().parent)]
    if is_packed:
        runpy.run_path(command.target, run_name="__main__")
        return
    file = str(path.absolute())
    with io.open_code(file) as stream:
        source = stream.read()
    # Not runpy.run_path, which takes its `__main__` away when the script ends: what runs at exit,
    # and threads that are still there, would find another one.
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__loader__ = SourceFileLoader("__main__", file)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec", dont_inherit=True), vars(main))


@contextlib.contextmanager
def _own_traceback() -> Iterator[None]:
    """Leave the frames of the launcher out of the traceback of what the script raises.

    Through `sys.excepthook`, whichever stands there by then, so that everything else about the end
    of a process (exit status, signals, what runs at exit) stays Python's own.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        hook = sys.excepthook

        def from_the_script_on(kind: Any, error: Any, trace: Any) -> None:
            # Python prints the traceback that the error has, and looks at no other.
            error.__traceback__ = without_frames(trace, _is_launcher)
            hook(kind, error, error.__traceback__)

        sys.excepthook = from_the_script_on
        raise


def _is_launcher(name: str) -> bool:
    return name.startswith(_PACKAGE) or name == runpy.__file__


def parse(arguments: Sequence[str]) -> Command:
    """Read the arguments of `run`: options up to the script or `-m`, all others are the script's.

    Raises:
        LaunchError: An option is unknown or has no value, or there is no script.
    """
    rest, patches, quiet = list(arguments), list[str](), False
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--patches", "-p"):
            if not equals:
                if not rest:
                    raise LaunchError(f"{word} needs a file, such as --patches patches.py.")
                value = rest.pop(0)
            patches.append(value)
        elif word in ("--quiet", "-q"):
            quiet = True
        elif word == "-m":
            if not rest:
                raise LaunchError("-m needs the name of a module, such as -m package.train.")
            return _command(patches, rest, quiet, is_module=True)
        elif word == "--":
            return _command(patches, rest, quiet)
        elif word.startswith("-") and word != "-":
            raise LaunchError(
                f"unknown option {word!r} before the script. The options of run are "
                f"--patches FILE, --quiet and -m MODULE; the script's own come after it."
            )
        else:
            return _command(patches, [word, *rest], quiet)
    return _command(patches, [], quiet)


def _command(
    patches: list[str], rest: list[str], quiet: bool, *, is_module: bool = False
) -> Command:
    if not patches:
        raise LaunchError("no patch file is given. Write --patches FILE before the script.")
    if not rest:
        raise LaunchError("no script is given. Write it after the options: train.py, or -m module.")
    return Command(tuple(patches), rest[0], tuple(rest[1:]), is_module, quiet)
