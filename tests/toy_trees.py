"""Small models of any form, for properties: shared modules, tied parameters, odd names."""

from __future__ import annotations

import copy

import torch
from hypothesis import strategies as st
from torch import nn


class Toy(nn.Module):
    """Holds whatever it is given."""


class OtherToy(nn.Module):
    """Another class of the same form."""


def make_namesake():
    """Return a class that has the name of `Toy` and is another one."""

    class Toy(nn.Module):
        pass

    return Toy


NamesakeToy = make_namesake()
CLASSES = [Toy, OtherToy, NamesakeToy, nn.Module]
NAMES = ["0", "1", "2", "attn", "mlp", "a:b", "<img src=x>", "层", "line\nbreak", "a|b{c}", "x y"]


@st.composite
def toy_models(draw, max_modules=7):
    """Draw a model without cycles; modules and parameters may be at several places."""
    modules = [nn.ReLU(), nn.Linear(2, 3), nn.Linear(2, 3)]
    tensors = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2)), None]
    for _ in range(draw(st.integers(1, max_modules))):
        module = draw(st.sampled_from(CLASSES))()
        for name in draw(st.lists(st.sampled_from(["weight", "bias"]), unique=True)):
            module.register_parameter(name, draw(st.sampled_from(tensors)))
        if draw(st.booleans()):
            shape = draw(st.sampled_from([(1,), (3,)]))
            module.register_buffer("steps", torch.zeros(shape), persistent=draw(st.booleans()))
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3)):
            child = draw(st.sampled_from(modules))
            module.add_module(name, child if draw(st.booleans()) else copy.deepcopy(child))
        modules.append(module)
    return modules[-1]


@st.composite
def changed_models(draw):
    """Draw a model and a copy of it with some modules exchanged, removed, added or reshaped."""
    before = draw(toy_models())
    after = copy.deepcopy(before)
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(list(after.modules())))
        names = [*parent._modules, "new"]
        name = draw(st.sampled_from(names))
        parent._modules.pop(name, None)
        if draw(st.booleans()):
            parent.add_module(name, draw(toy_models(max_modules=2)))
        if draw(st.booleans()):
            shape = draw(st.sampled_from([(2,), (5,)]))
            parent.register_parameter("weight", nn.Parameter(torch.zeros(shape)))
    return before, after
