"""The catalog's file on disk: where it lies, when it is stale, how it is written.

The file is a convenience and never a source of errors: what cannot be read, has another stamp, or
is cut short counts as absent, and a disk that cannot be written leaves the catalog in memory only.
Writing goes through a temporary file and one rename, so a reader in another process sees the old
file or the new one and never half of one.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def cache_folder() -> Path | None:
    """Return the folder for patchlab's cached files, None if there is no home to put it in.

    `PATCHLAB_CACHE` names it outright; else it is `patchlab` in the user's cache folder, which is
    `XDG_CACHE_HOME` where that is set and the platform's own otherwise.
    """
    if chosen := os.environ.get("PATCHLAB_CACHE"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "patchlab"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "patchlab" / "Cache"
    try:
        home = Path.home()
    except RuntimeError:  # no home folder, as for some service users
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "patchlab"


def cache_file(root: Path, version: str) -> Path | None:
    """Return the catalog's file for one installation; two environments do not share one."""
    folder = cache_folder()
    if folder is None:
        return None
    place = hashlib.sha256(str(root).encode()).hexdigest()[:10]
    return folder / f"catalog-{version}-{place}.json.gz"


def stamp_of(version: str, paths: Iterable[str]) -> str:
    """Digest what the catalog depends on: the version, and size and time of each file.

    Args:
        version: Version of transformers.
        paths: The files that are read, and those that read them.
    """
    digest = hashlib.sha256(f"{version}\n".encode())
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116  a Path for each of 2,000 files costs 20 ms
        except OSError:
            continue
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read_cache(path: Path | None, stamp: str) -> dict[str, Any] | None:
    """Return the cached data, None if there is none of this stamp or it is damaged."""
    if path is None:
        return None
    was_enabled = gc.isenabled()
    gc.disable()  # 100,000 small lists: the collector would take longer than the decoding
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return None
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(data, dict) or data.get("stamp") != stamp:
        return None
    return data


def write_cache(path: Path | None, data: dict[str, Any]) -> bool:
    """Write the data in one step; False if the disk does not let us."""
    if path is None:
        return False
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=path.name, suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            file.write(packed)
        Path(temporary).replace(path)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        return False
    return True
