"""The tree of an odd model: cycles, endless depth, tensors that are not there or refuse."""

from __future__ import annotations

import torch
from torch import nn

from patchlab.model import walk
from patchlab.model.tree import module_tree
from tests.toy_trees import Toy


def test_a_cycle_is_one_back_reference_and_is_counted_once():
    inner = nn.Linear(2, 2)
    inner.add_module("me", inner)
    tree = module_tree(nn.Sequential(inner))

    assert [(node.fqn, node.shared_with, node.is_cycle) for node in tree] == [
        ("", None, False),
        ("0", None, False),
        ("0.me", "0", True),
    ]
    assert tree.num_parameters == 6
    assert "↺ me" in tree.to_text()
    assert "back to 0" in tree.to_text()


def test_a_cycle_to_the_root_says_so():
    model = nn.Linear(2, 2)
    model.add_module("me", model)

    assert module_tree(model).nodes[1].shared_with == ""
    assert "back to the root" in module_tree(model).to_text()


def test_a_longer_cycle_ends_at_the_ancestor():
    outer, inner = Toy(), Toy()
    outer.add_module("inner", inner)
    inner.add_module("outer", outer)

    assert [node.fqn for node in module_tree(outer)] == ["", "inner", "inner.outer"]


def test_a_module_with_a_cycle_that_comes_twice_ends_at_both_places():
    """Its second place was once followed round and round, until a hundred thousand repeats."""
    inner = nn.Linear(2, 2)
    inner.add_module("me", inner)
    tree = module_tree(nn.Sequential(inner, inner))

    assert [(node.fqn, node.shared_with, node.is_cycle) for node in tree] == [
        ("", None, False),
        ("0", None, False),
        ("0.me", "0", True),
        ("1", "0", False),
        ("1.me", "1", True),
    ]
    assert tree.num_parameters == 6


def test_a_module_at_two_paths_below_each_other_is_no_cycle():
    """Guards the test above: not every repeat is a cycle."""
    shared = nn.Linear(2, 2)
    tree = module_tree(nn.Sequential(shared, nn.Sequential(shared)))

    assert [node.is_cycle for node in tree] == [False] * 4
    assert tree.find("1.0").shared_with == "0"
    assert tree.num_parameters == 6


def test_depth_is_no_limit():
    model = root = Toy()
    for _ in range(5_000):
        root.add_module("down", Toy())
        root = root.down
    tree = module_tree(model)

    assert tree.nodes[-1].depth == 5_000
    assert tree.to_text(max_rows=20).endswith("… 4,981 more rows")


def test_doubling_is_cut_and_said(monkeypatch):
    monkeypatch.setattr(walk, "MAX_REPEATED_NODES", 50)
    module = nn.Linear(1, 1)
    for _ in range(40):
        module = nn.ModuleList([module, module])
    tree = module_tree(module)

    assert len(tree) < 200
    assert tree.num_parameters == 2
    assert tree.children(tree.root)[1].num_parameters == 2
    assert "not followed" in tree.to_text()


def test_lazy_parameters_are_uninitialized_and_count_nothing():
    tree = module_tree(nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2)))

    assert tree.num_parameters == 6
    assert tree.find("0").parameters[0].shape is None
    assert tree.to_text().count("uninitialized") == 1


def test_a_tensor_that_refuses_to_be_read_is_no_reason_to_fail():
    class Refusing(torch.Tensor):
        @property
        def shape(self):
            raise RuntimeError("no shape for you")

        @property
        def dtype(self):
            raise TypeError("no dtype for you")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0]._parameters["weight"] = torch.zeros(2).as_subclass(Refusing)
    tree = module_tree(model)

    assert str(tree.find("0").parameters[0]) == "weight uninitialized unknown"
    assert tree.num_parameters == 2 + 6


def test_a_module_whose_attributes_and_repr_raise_is_shown():
    class Hostile(nn.Module):
        def __getattr__(self, name):
            raise RuntimeError(f"no {name} for you")

        def extra_repr(self):
            raise RuntimeError("no repr for you")

    model = nn.Sequential(Hostile())

    assert module_tree(model).find("0").class_name == "Hostile"


def test_missing_children_and_parameters_are_left_out():
    model = Toy()
    model.add_module("none", None)
    model.register_parameter("weight", None)
    model.register_buffer("steps", None)
    (root,) = module_tree(model)

    assert (root.parameters, root.buffers) == ((), ())
