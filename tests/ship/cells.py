"""What cells define, exported and read back."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

import patchlab
from patchlab.errors import ExportError

IMPORTS = """
import functools, torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
"""
USES = "class MyMLP(LlamaMLP):\n    def forward(self, x):\n        return {}(x)"
_numbers = itertools.count()


def run(shell, *cells):
    for cell in cells:
        shell.run_cell(cell).raise_error()


def export(shell, path, name="MyMLP"):
    return patchlab.export_patches(path, {"LlamaMLP": shell.user_ns[name]}, conversions={})


def imported(path):
    """Run an exported file as a Python module, as another process would."""
    spec = importlib.util.spec_from_file_location(f"exported_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(shell, path, *cells, name="MyMLP"):
    """Run cells, check that the export is refused and leaves no file, and return why."""
    run(shell, *cells)
    with pytest.raises(ExportError) as error:
        export(shell, path, name)
    assert list(path.parent.iterdir()) == []
    return str(error.value)
