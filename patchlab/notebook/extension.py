"""`%load_ext patchlab`: everything that patchlab adds to an IPython shell, and takes out again."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from patchlab.notebook.magics import PatchMagics, rewrite
from patchlab.notebook.own_errors import shorten_own_errors, show_own_errors_whole
from patchlab.notebook.tree_views import hide_widgets, show_widgets

_loaded: WeakSet[Any] = WeakSet()


def load_ipython_extension(shell: Any) -> None:
    """Add `%%patched` and `%patches` to a shell; a second time does nothing.

    While the extension is loaded, `from_pretrained` and `from_config` build under patchlab's own
    engine, so that what a notebook registers is applied and put back as patchlab promises;
    patchlab's errors show the user's lines alone; and in a kernel, trees and differences show as
    widgets.
    """
    if shell in _loaded:
        return
    from patchlab.apply import hooks

    hooks.hold("extension")
    _loaded.add(shell)
    magics = PatchMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(rewrite)
    shell.events.register("pre_execute", magics.scopes.close_finished)
    shell.events.register("post_execute", magics.scopes.close_finished)
    shell.events.register("post_run_cell", magics.record_classes)
    shorten_own_errors()
    if getattr(shell, "kernel", None) is not None:
        # A terminal shows text alone, and a widget made for it would only take time.
        show_widgets()


def unload_ipython_extension(shell: Any) -> None:
    """Take out what was added and close what cells have open; not loaded, it does nothing."""
    if shell not in _loaded:
        return
    from patchlab.apply import hooks

    _loaded.discard(shell)
    magics = shell.magics_manager.registry.pop(PatchMagics.__name__)
    for kind, names in magics.magics.items():
        known = shell.magics_manager.magics[kind]
        for name in names:
            known.pop(name, None)
    if rewrite in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(rewrite)
    shell.events.unregister("pre_execute", magics.scopes.close_finished)
    shell.events.unregister("post_execute", magics.scopes.close_finished)
    shell.events.unregister("post_run_cell", magics.record_classes)
    try:
        magics.scopes.close()
    finally:
        if not _loaded:
            hide_widgets()
            show_own_errors_whole()
            hooks.release("extension")
