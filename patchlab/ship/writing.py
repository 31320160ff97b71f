"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from patchlab.errors import ExportError
from patchlab.ship.homes import is_installed

MARK = "# Patches for transformers models, written by patchlab.export_patches."


def checked_path(path: str | os.PathLike[str], imported: set[str] | frozenset[str]) -> Path:
    """Return where a patch file can be written.

    Args:
        path: As the user gave it; a link is followed.
        imported: The packages that the file imports; one of its own name would be hidden.

    Raises:
        ExportError: It is a folder, not a `.py` file, in a folder that is not there, called as a
            Python module that the file needs, or a file that patchlab has not written.
    """
    try:
        given = Path(path)
    except TypeError as error:
        raise ExportError(
            f"the path must be a string or a path, got {type(path).__name__}. Give the file to "
            f"write, such as 'patches.py'."
        ) from error
    try:
        target = Path(os.path.realpath(given))
        is_folder = target.is_dir()
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{_begin(str(path))!r} is no path that a file can have: {error}. Give another."
        ) from error
    if is_folder:
        raise ExportError(
            f"{str(path)!r} is a folder. Give the file to write in it: "
            f"{str(given / 'patches.py')!r}."
        )
    if target.suffix != ".py":
        raise ExportError(
            f"{str(path)!r} does not end in .py, so Python cannot import it. Use "
            f"{str(given.with_suffix('.py')) if given.name else 'patches.py'!r}."
        )
    if not target.parent.is_dir():
        raise ExportError(
            f"the folder of {str(path)!r} is not there. Make it first, or give another path."
        )
    stem = target.stem
    hides = {*imported, "torch", "transformers", "patchlab"} | sys.stdlib_module_names
    # transformers' own scan takes any Python module whose name begins with its own for a part of
    # it, and would replace the originals that the file imports (monkey_patching.py, 5.24.0).
    if stem in hides or stem.startswith("transformers") or is_installed(stem):
        raise ExportError(
            f"a file {target.name!r} would stand in the way of the Python module {stem!r}, or be "
            f"taken for a part of transformers. Give it another name, such as 'my_patches.py'."
        )
    if target.exists() and not (target.is_file() and _is_ours(target)):
        raise ExportError(
            f"{str(path)!r} is there already and was not written by export_patches. Give another "
            f"path, or remove the file first."
        )
    return target


def write_whole(target: Path, text: str) -> None:
    """Write a text file, or leave what is there as it is, whatever happens meanwhile.

    Raises:
        ExportError: The file system refuses it.
    """
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        try:
            beside.write_bytes(text.encode())
            if target.exists():
                beside.chmod(target.stat().st_mode)
            os.replace(beside, target)  # noqa: PTH105
        finally:
            # After the replacement it is not there any more.
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(
            f"{str(target)!r} cannot be written: {error.strerror or error}. Nothing was changed."
        ) from error


def _begin(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_ours(target: Path) -> bool:
    try:
        return target.read_bytes().splitlines()[:1] == [MARK.encode()]
    except OSError:
        return False
