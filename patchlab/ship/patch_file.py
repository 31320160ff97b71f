"""Patch files: reviewable Python files that register patches in whatever process reads them.

A patch file is one that `patchlab.export_patches` has written, or any Python file that has a
function `register()`, or a dict `MAPPING` (key → replacement class) with or without a dict
`CONVERSIONS` (model type or class name → list of weight conversions). `register()` is called if it
is there; otherwise the two dicts are registered.

A file is imported under its own name where that is free, and its folder is put at the end of
`sys.path`: an instance of a replacement class can then be pickled, and a spawned process, which
gets the `sys.path` of its parent, can unpickle it.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from patchlab._upstream import conversion_module
from patchlab.apply.conversions import check_conversions
from patchlab.apply.hooks import get_patch_mapping, register_patch_mapping
from patchlab.errors import LaunchError
from patchlab.mapping.registry import registered_by

_LOCK = threading.RLock()
_read: dict[Path, RegisteredFile] = {}


@dataclass(frozen=True, slots=True)
class RegisteredFile:
    """A patch file whose patches are registered in this process.

    Attributes:
        path: The file, absolute.
        digest: SHA-256 of its text, 64 hexadecimal digits.
        keys: The keys that it has registered, in order.
        conversions: The names of its `CONVERSIONS`, if it has any.
        module: The file as a Python module.
    """

    path: Path
    digest: str
    keys: tuple[str, ...]
    conversions: tuple[str, ...]
    module: ModuleType

    def __str__(self) -> str:
        return f"{self.path.name}: {len(self.keys)} registered"


def register_files(paths: Iterable[str | Path]) -> tuple[RegisteredFile, ...]:
    """Register patch files in this process, in order; a later one wins over an earlier one.

    Raises:
        LaunchError: As `register_patch_file` does; the files before it stay registered.
    """
    return tuple(register_patch_file(path) for path in paths)


def register_patch_file(path: str | Path) -> RegisteredFile:
    """Register what a patch file holds, in this process.

    A file that is registered already and has not changed is not run again. A file whose function
    `register()` calls transformers' own registry works as well.

    Args:
        path: The file.

    Returns:
        What was registered.

    Raises:
        LaunchError: There is no such file, it cannot be run, it has neither `register()` nor
            `MAPPING`, or what it has cannot be registered. The cause is chained.
    """
    file, source = _source_of(path)
    digest = hashlib.sha256(source).hexdigest()
    with _LOCK:
        known = _read.get(file)
        if known is not None and known.digest == digest:
            now = get_patch_mapping()
            if known.keys and all(key in now for key in known.keys):
                return known
            module = known.module
        else:
            module = _import(file, source)
        before = get_patch_mapping()
        _register(file, module)
        after = get_patch_mapping()
        declared = getattr(module, "MAPPING", None)
        keys = [key for key, cls in after.items() if before.get(key) is not cls]
        if isinstance(declared, dict):
            keys = [*keys, *(key for key in declared if key in after and key not in keys)]
        conversions = getattr(module, "CONVERSIONS", None)
        names = tuple(conversions) if isinstance(conversions, dict) else ()
        if not keys and not names:
            raise LaunchError(
                f"{file} was run and has registered nothing: its register() did not, and its "
                f"MAPPING is empty. Fill MAPPING, or register in register()."
            )
        _read[file] = RegisteredFile(file, digest, tuple(keys), names, module)
        return _read[file]


def registered_files() -> tuple[RegisteredFile, ...]:
    """Return the patch files that were registered in this process, in order."""
    return tuple(_read.values())


def parallel_plan_of(files: Iterable[RegisteredFile]) -> dict[str, str]:
    """Return the `TP_PLAN` of patch files, merged: module name with `*` → style."""
    plan: dict[str, str] = {}
    for file in files:
        plan |= getattr(file.module, "TP_PLAN", None) or {}
    return plan


def without_frames(
    trace: Any, is_ours: Callable[[str], bool] = lambda name: name == __file__
) -> Any:
    """Return a traceback from the first frame that is of no file in question on."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not is_ours(name) and not name.startswith("<frozen "):
            break
        trace = trace.tb_next
    return trace


def _source_of(path: str | Path) -> tuple[Path, bytes]:
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        raise LaunchError(f"{file} is a folder. Give the patch file in it, such as patches.py.")
    try:
        return file.resolve(), file.read_bytes()
    except OSError as error:
        raise LaunchError(
            f"no patch file {str(path)!r}: {error.strerror or error}. Give the file that "
            f"patchlab.export_patches has written, or a Python file with a register() function."
        ) from error


def _import(file: Path, source: bytes) -> ModuleType:
    """Run a patch file as a Python module that other processes find by name."""
    name = _module_name(file)
    loaded = sys.modules.get(name)
    if loaded is not None and file not in _read and _is_file(loaded, file):
        return loaded  # the script's own `import patches`, of the same file
    try:
        code = compile(source, str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        number = getattr(error, "lineno", None)
        line = f", line {number}" if number else ""
        text = (getattr(error, "text", None) or "").strip()
        raise LaunchError(
            f"patch file {file}{line}: {getattr(error, 'msg', error)}{': ' if text else ''}{text}"
        ) from error
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # With a loader, since Python knows none for a name that does not end in .py.
    loader = SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(code, vars(module))
    except BaseException as error:
        if loaded is None:
            del sys.modules[name]
        else:
            sys.modules[name] = loaded
        # One that exits would end the run before its script, and with status 0 unnoticed.
        if not isinstance(error, Exception | SystemExit):
            raise
        raise _failed(file, "running it", error) from error
    return module


def _module_name(file: Path) -> str:
    """Return the name of the file, or one with a digest in it where that would hide another."""
    stem = file.stem
    unique = f"{stem if stem.isidentifier() else 'patches'}_{_short_digest(str(file))}"
    loaded = sys.modules.get(stem)
    if not stem.isidentifier() or (loaded is not None and not _is_file(loaded, file)):
        return unique
    if loaded is not None:
        return stem
    try:
        found = importlib.util.find_spec(stem)
    except (ImportError, ValueError):
        return unique
    if found is None or (found.origin and Path(found.origin).resolve() == file):
        return stem
    return unique


def _is_file(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return bool(origin) and Path(str(origin)).resolve() == file


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _register(file: Path, module: ModuleType) -> None:
    own = getattr(module, "register", None)
    mapping: dict[str, type[nn.Module]] | None = getattr(module, "MAPPING", None)
    if not callable(own) and not isinstance(mapping, dict):
        raise LaunchError(
            f"{file} has neither a function register() nor a dict MAPPING of key → class. Write "
            f"one, or have patchlab.export_patches write the file."
        )
    try:
        with registered_by(file.name):
            if callable(own):
                own()
            else:
                assert mapping is not None
                conversions = check_conversions(getattr(module, "CONVERSIONS", None))
                # A changed file takes the place of what it was.
                register_patch_mapping(mapping, overwrite=file in _read)
                for name, items in conversions.items():
                    conversion_module().register_checkpoint_conversion_mapping(
                        name, copy.deepcopy(items), overwrite=True
                    )
    except (Exception, SystemExit) as error:
        raise _failed(file, "registering what it holds", error) from error


def _failed(file: Path, doing: str, error: BaseException) -> LaunchError:
    """Say where in the file it failed; the whole traceback is the cause's."""
    frames = traceback.extract_tb(without_frames(error.__traceback__))
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    where = f", line {lines[-1]}" if lines else ""
    return LaunchError(f"patch file {file}{where}: {doing} failed: {type(error).__name__}: {error}")
