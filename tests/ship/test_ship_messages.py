"""What cannot be written into a patch file, or launched, is told with the way out."""

from __future__ import annotations

import dataclasses
import enum
import re

import pytest
import torch
from torch import nn
from transformers import WeightConverter
from transformers.core_model_loading import ConversionOps

import patchlab
from patchlab.errors import ExportError, TargetError
from patchlab.ship.literals import constant
from patchlab.ship.probe_command import main
from tests.ship.cells import USES, refused
from tests.toys import SubMLP

CELLS = {
    "a class that a constant holds": (
        ["kinds = [type('Made', (), {})]", USES.format("kinds.index")],
        r"it uses 'Made': .* made by type\(\) or by a function, or its source is gone. Write it",
    ),
    "a class made in a function that a constant holds": (
        ["def make():\n    class Local: pass\n    return Local", "kinds = [make()]",
         USES.format("kinds.index")],
        "it uses Local, and it was made inside the function make. Write it at the top level",
    ),
    "a function that its Python module does not have": (
        ["def f(x): return x\nf.__module__ = 'torch.nn.functional'", USES.format("f")],
        "torch.nn.functional has no f by which it could be imported",
    ),
    "a string that would change with its indentation": (
        ["if True:\n    class MyMLP(LlamaMLP):\n        text = '''\n    a'''\n"
         "        def forward(self, x): return x"],
        "is part of a larger one and cannot be taken out. Write it at the top level of a cell",
    ),
    "a statement that only a session takes": (
        ["async def given(): return 3", "def f(x, n=await given()): return x", USES.format("f")],
        "the file would not compile: .* Nothing was written. .* reads differently in a file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CELLS)
def test_refusal_of_what_a_cell_defines_says_why(shell, path, case):
    cells, why = CELLS[case]

    said = refused(shell, path, *cells)

    assert re.search(why, " ".join(said.split()))


class Open(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value):
        made = object.__new__(cls)
        made._name_, made._value_ = "B", value
        return made


@dataclasses.dataclass(eq=False)
class Layer(nn.Module):
    width: int

    def __post_init__(self):
        super().__init__()


@dataclasses.dataclass
class Counted:
    calls: int = dataclasses.field(default=0, init=False)


CONSTANTS = {
    "a slice of what has no code": (slice(object(), None), "it holds a object"),
    "an enum value that is no member": (Open(2), "<Open.B: 2> is no member of Open as it is now"),
    "a module that is a dataclass": (object.__new__(Layer), "Layer, a live module"),
    "a field beside the constructor": (Counted(), "'calls' is not set by the constructor"),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_refusal_of_a_constant_says_why(case):
    value, why = CONSTANTS[case]

    with pytest.raises(ExportError, match=why):
        constant(value, lambda value: value.__name__)


class Kept(ConversionOps):
    def convert(self, input_dict, *args, **kwargs):
        return input_dict


class Unnamed(Kept):
    def __init__(self, *by):
        self.by = by


class Grown(Kept):
    def __init__(self, by):
        self.by, self.times = by, 0


def grown():
    operation = Grown(2)
    operation.times = 3
    return operation


OPERATIONS = {
    "arguments without a name": (
        Unnamed(1),
        "the constructor of Unnamed takes arguments without a name. Name them",
    ),
    "what its constructor does not make": (
        grown(),
        "the times of Grown is 3, which its constructor does not make of what it takes. Give it",
    ),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_refusal_of_an_operation_says_why(path, case):
    operation, why = OPERATIONS[case]
    conversions = {"llama": [WeightConverter(["a"], ["b"], [operation])]}

    with pytest.raises(ExportError, match=why):
        patchlab.export_patches(path, {"LlamaMLP": SubMLP}, conversions=conversions)
    assert not path.exists()


@pytest.mark.parametrize(
    ("model_type", "said"),
    [("lama", "has no model type 'lama'. Near: llama"), ("zzzz", "Give one such as llama")],
)
def test_model_type_that_there_is_not_is_told_with_what_is_near(model_type, said):
    with pytest.raises(TargetError, match=said):
        main(["-p", "x.py", "--model-type", model_type])


def test_constants_of_the_kinds_above_are_written_where_they_can_be():
    """Guards the refusals: the sound value of each kind."""
    sound = [slice(1, None), Open.A, torch.float16]

    written = ["".join(str(constant(value, lambda v: v.__name__))) for value in sound]

    assert ["slice" in written[0], "Open.A" in written[1], "float16" in written[2]] == [True] * 3
