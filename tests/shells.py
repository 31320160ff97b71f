"""A fresh IPython shell in this process, without patchlab's extension."""

from __future__ import annotations

import builtins
import linecache
import sys
from contextlib import contextmanager

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@contextmanager
def fresh_shell():
    """Yield a shell; the process is as it was when the block ends."""
    kept = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    known, lines = set(vars(builtins)), dict(linecache.cache)
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.xmode = "Context"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    try:
        yield shell
    finally:
        if "patchlab" in shell.extension_manager.loaded:
            shell.extension_manager.unload_extension("patchlab")
        InteractiveShell.clear_instance()
        sys.displayhook, sys.excepthook, sys.modules["__main__"] = kept
        linecache.cache.clear()
        linecache.cache.update(lines)
        for name in set(vars(builtins)) - known:
            delattr(builtins, name)
