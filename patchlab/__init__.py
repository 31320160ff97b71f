"""See, scope and undo the class patches of Hugging Face models, from a Jupyter notebook.

Every public name is listed in `__all__` and loads its room on first use: importing patchlab itself
loads neither torch, transformers nor Jupyter, and changes nothing in the process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from patchlab.apply.concatenation import concatenate_by_config
    from patchlab.apply.recorders import patch_output_recorders
    from patchlab.apply.report import PatchReport
    from patchlab.apply.scope import apply_patches, patched
    from patchlab.apply.swap import Swap, swap
    from patchlab.mapping.registry import (
        clear_patch_mapping,
        get_patch_mapping,
        register_patch_mapping,
        unregister_patch_mapping,
    )
    from patchlab.model.diff import TreeDiff, diff_trees
    from patchlab.model.tree import ModuleTree, module_tree
    from patchlab.notebook.extension import load_ipython_extension, unload_ipython_extension
    from patchlab.notebook.forms import patch_form
    from patchlab.notebook.lab import lab
    from patchlab.plan.explain import explain
    from patchlab.plan.findings import Finding
    from patchlab.plan.survey import Survey, survey
    from patchlab.routing.record import record_routing
    from patchlab.routing.replay import replay_routing
    from patchlab.routing.trace import RoutingTrace
    from patchlab.ship.export import PatchFile, export_patches
    from patchlab.verify.checkpoint import CheckpointReport, check_checkpoint
    from patchlab.verify.outputs import OutputComparison, compare_outputs
    from patchlab.verify.preview import Preview, preview
    from patchlab.verify.status import Status, status

# Public name → the Python module it lives in. The registry is reached through `apply.hooks`, which
# brings what is registered into `from_pretrained` and `from_config`.
_HOMES = {
    "register_patch_mapping": "patchlab.apply.hooks",
    "unregister_patch_mapping": "patchlab.apply.hooks",
    "get_patch_mapping": "patchlab.apply.hooks",
    "clear_patch_mapping": "patchlab.apply.hooks",
    "apply_patches": "patchlab.apply.scope",
    "patched": "patchlab.apply.scope",
    "PatchReport": "patchlab.apply.report",
    "patch_output_recorders": "patchlab.apply.recorders",
    "concatenate_by_config": "patchlab.apply.concatenation",
    "swap": "patchlab.apply.swap",
    "Swap": "patchlab.apply.swap",
    "module_tree": "patchlab.model.tree",
    "ModuleTree": "patchlab.model.tree",
    "diff_trees": "patchlab.model.diff",
    "TreeDiff": "patchlab.model.diff",
    "check_checkpoint": "patchlab.verify.checkpoint",
    "CheckpointReport": "patchlab.verify.checkpoint",
    "compare_outputs": "patchlab.verify.outputs",
    "OutputComparison": "patchlab.verify.outputs",
    "preview": "patchlab.verify.preview",
    "Preview": "patchlab.verify.preview",
    "survey": "patchlab.plan.survey",
    "Survey": "patchlab.plan.survey",
    "Finding": "patchlab.plan.findings",
    "explain": "patchlab.plan.explain",
    "status": "patchlab.verify.status",
    "Status": "patchlab.verify.status",
    "export_patches": "patchlab.ship.export",
    "PatchFile": "patchlab.ship.export",
    "record_routing": "patchlab.routing.record",
    "replay_routing": "patchlab.routing.replay",
    "RoutingTrace": "patchlab.routing.trace",
    "patch_form": "patchlab.notebook.forms",
    "lab": "patchlab.notebook.lab",
    "load_ipython_extension": "patchlab.notebook.extension",
    "unload_ipython_extension": "patchlab.notebook.extension",
}


__all__ = [
    "CheckpointReport",
    "Finding",
    "ModuleTree",
    "OutputComparison",
    "PatchFile",
    "PatchReport",
    "Preview",
    "RoutingTrace",
    "Status",
    "Survey",
    "Swap",
    "TreeDiff",
    "apply_patches",
    "check_checkpoint",
    "clear_patch_mapping",
    "compare_outputs",
    "concatenate_by_config",
    "diff_trees",
    "explain",
    "export_patches",
    "get_patch_mapping",
    "lab",
    "load_ipython_extension",
    "module_tree",
    "patch_form",
    "patch_output_recorders",
    "patched",
    "preview",
    "record_routing",
    "register_patch_mapping",
    "replay_routing",
    "status",
    "survey",
    "swap",
    "unload_ipython_extension",
    "unregister_patch_mapping",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'patchlab' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
