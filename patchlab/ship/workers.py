"""Worker processes: the same patches in spawned processes, pools and Ray actors.

A forked process has the registry of its parent, a spawned one starts with an empty registry, and
so does a Ray worker. They register the patch file themselves, before they build a model:

    Process(target=train, args=...)                      # train() calls register_file(path) first
    Pool(4, initializer=register_file, initargs=(path,))
    ray.init(runtime_env=ray_runtime_env(path))

The workers of a `DataLoader` build no models and need nothing: what they load is not patched.
Whether a process is patched, `patchlab.status()` says when it is called there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from patchlab.errors import LaunchError
from patchlab.ship.patch_file import RegisteredFile, register_files, register_patch_file

VARIABLE = "PATCHLAB_PATCHES"
HOOK = "patchlab.ship.workers.register_from_environment"


def register_file(path: str | Path) -> None:
    """Register a patch file in this process; a second time does nothing.

    Args:
        path: The file.

    Raises:
        LaunchError: The file cannot be registered.
    """
    register_patch_file(path)


def register_from_environment() -> tuple[RegisteredFile, ...]:
    """Register the patch files that the environment variable `PATCHLAB_PATCHES` lists, in order.

    Returns:
        What was registered; nothing if there is no such variable.

    Raises:
        LaunchError: A file cannot be registered, or the variable is no JSON list of paths.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return ()
    try:
        paths = json.loads(text)
    except ValueError:
        paths = None
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise LaunchError(
            f"the environment variable {VARIABLE} is {text!r}. Set it to a JSON list of paths, as "
            f"patchlab.ship.workers.ray_runtime_env does."
        )
    return register_files(paths)


def ray_runtime_env(*paths: str | Path) -> dict[str, Any]:
    """Return a `runtime_env` under which each Ray worker registers patch files when it starts.

    For `ray.init`, or for the options of one actor or task. On several machines the files have to
    be at the same paths on each, and patchlab installed. To add to a `runtime_env` of your own,
    merge its `env_vars`.

    Args:
        paths: The files, in order.

    Returns:
        A new dict with `worker_process_setup_hook` and `env_vars`.

    Raises:
        LaunchError: A file is not there.
    """
    files = [Path(path).expanduser().absolute() for path in paths]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise LaunchError(
            f"no patch file {', '.join(missing) or 'is given'}. Give the files that "
            f"patchlab.export_patches has written."
        )
    return {
        "worker_process_setup_hook": HOOK,
        "env_vars": {VARIABLE: json.dumps([str(file) for file in files])},
    }
