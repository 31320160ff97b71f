"""Folding: nothing is lost, nothing unequal becomes one row, and real models become short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from benchmarks.synthetic import synthetic_model
from patchlab.model.diff import diff_trees
from patchlab.model.folding import fold, join_names
from patchlab.model.tree import module_tree
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.render.rows import Mark
from tests.toy_trees import NamesakeToy, Toy, toy_models


@st.composite
def columns(draw):
    """Draw a tree as columns in preorder, with few different names and keys."""
    depths, parents, names, keys = [], [], [], []
    for node in range(draw(st.integers(1, 25))):
        depth = 0 if node == 0 else draw(st.integers(1, depths[-1] + 1))
        parents.append(max((n for n in range(node) if depths[n] == depth - 1), default=-1))
        depths.append(depth)
        siblings = sum(parent == parents[-1] for parent in parents)
        names.append(str(siblings))
        keys.append(draw(st.sampled_from("ab")))
    return parents, names, keys


def written_out(node, parents, names, keys):
    """Write a node and all below it, without its own name."""
    below = [n for n, parent in enumerate(parents) if parent == node]
    return (keys[node], [(names[n], written_out(n, parents, names, keys)) for n in below])


@given(columns())
def test_two_nodes_have_one_shape_if_and_only_if_they_are_equal_all_the_way_down(tree):
    shapes = fold(*tree).shapes
    written = [written_out(node, *tree) for node in range(len(shapes))]
    for a, shape in enumerate(shapes):
        for b in range(a):
            assert (shape == shapes[b]) == (written[a] == written[b])


@given(columns())
def test_folded_rows_stand_for_every_node(tree):
    total, above = 0, []
    for row in fold(*tree).rows:
        del above[row.depth :]
        above.append(len(row.members) * (above[-1] if above else 1))
        total += above[-1]

    assert total == len(tree[0])


@given(columns())
def test_no_two_siblings_that_are_left_are_equal(tree):
    parents = tree[0]
    folding = fold(*tree)
    seen = [(parents[row.index], folding.shapes[row.index]) for row in folding.rows]

    assert len(seen) == len(set(seen))


@given(toy_models())
def test_marked_modules_are_all_to_be_seen(model):
    tree = module_tree(model)
    marks = {fqn: Mark("match", "●", "replaced") for fqn in tree.fqns[::3]}
    marked, above = 0, []
    for row in tree.to_table(marks=marks).rows:
        del above[row.depth :]
        above.append(row.fold * (above[-1] if above else 1))
        marked += above[-1] if row.note.startswith("replaced") else 0

    assert marked == sum(fqn in marks for fqn in tree.fqns)


def test_equal_siblings_that_are_no_neighbors_fold():
    model = nn.ModuleList([nn.Linear(2, 2 + n % 2) for n in range(6)])
    labels = [(row.label, row.fold) for row in module_tree(model).to_table().rows]

    assert labels == [("ModuleList", 1), ("0, 2, 4", 3), ("1, 3, 5", 3)]


def test_classes_of_one_name_do_not_fold():
    model = nn.ModuleList([Toy(), NamesakeToy(), Toy()])

    assert [row.fold for row in module_tree(model).to_table().rows] == [1, 2, 1]


def test_a_mark_on_one_layer_takes_it_out_of_the_fold():
    model = nn.ModuleList([nn.Sequential(nn.ReLU()) for _ in range(4)])
    rows = module_tree(model).to_table(marks={"2.0": Mark()}).rows

    assert [(row.label, row.fold) for row in rows] == [
        ("ModuleList", 1),
        ("0–1, 3", 3),
        ("0", 1),
        ("2", 1),
        ("0", 1),
    ]


def test_layers_with_equal_marks_still_fold():
    model = nn.ModuleList([nn.Sequential(nn.ReLU()) for _ in range(4)])
    rows = module_tree(model).to_table(marks={f"{n}.0": Mark() for n in range(4)}).rows

    assert [(row.label, row.fold, row.tone) for row in rows] == [
        ("ModuleList", 1, "plain"),
        ("0–3", 4, "plain"),
        ("0", 1, "match"),
    ]


def test_an_activation_shared_by_all_layers_does_not_keep_them_apart():
    shared = nn.ReLU()
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), shared) for _ in range(4)])

    assert [row.fold for row in module_tree(model).to_table().rows] == [1, 4, 1, 1]


def test_a_shared_layer_with_parameters_is_told_from_its_copies():
    layer = nn.Linear(2, 2)
    model = nn.ModuleList([layer, layer, layer, nn.Linear(2, 2)])
    rows = module_tree(model).to_table().rows

    assert [(row.label, row.note) for row in rows[1:]] == [
        ("0, 3", ""),
        ("1–2", "shared with 0"),
    ]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["only"], "only"),
        (["0", "1", "2"], "0–2"),
        (["0", "1", "3"], "0–1, 3"),
        (["0", "2", "4", "6"], "0, 2 … 6"),
        (["9", "10", "11"], "9–11"),
        (["q", "k"], "q, k"),
        (["q", "k", "v", "o"], "q, k … o"),
        (["0", "1", "head"], "0–1, head"),
        (["9" * 5_000, "head"], "9" * 5_000 + ", head"),
    ],
)
def test_names_are_joined_as_ranges(names, label):
    assert join_names(names) == label


def test_deepseek_v3_in_full_size_is_41_lines_with_all_modules():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config())
    tree = module_tree(model)

    assert len(tree) == len(list(model.modules())) > 1_200
    assert tree.num_parameters == sum(p.numel() for p in model.parameters())
    assert len(tree.to_text().splitlines()) <= 41
    assert sum_of_folds(tree) == len(tree)


def test_fifty_thousand_modules_are_97_lines():
    with torch.device("meta"):
        tree = module_tree(synthetic_model(50_000))

    assert len(tree) >= 50_000
    assert len(tree.to_text().splitlines()) <= 97
    assert sum_of_folds(tree) == len(tree)


@given(toy_models())
def test_a_tree_is_shown_alike_when_it_is_shown_again(model):
    """What was folded for the text serves the HTML and the widget, and marks leave it alone."""
    tree = module_tree(model)
    marks = {tree.fqns[-1]: Mark("match", "●", "replaced")}
    marked = tree.to_html(marks=marks)
    diff = diff_trees(tree, module_tree(nn.Sequential(model)))
    narrow = diff.to_text(changes_only=True)

    shown = tree.to_text(), tree.to_html(), TreeWidget(tree).payload, diff.to_html()

    again = replace(tree)
    assert "folding" in vars(tree)
    assert "folding" not in vars(again)
    assert shown[2:] == (TreeWidget(again).payload, replace(diff).to_html())
    assert shown[:2] == (again.to_text(), replace(tree).to_html())
    assert marked == tree.to_html(marks=marks) == replace(tree).to_html(marks=marks)
    assert narrow == diff.to_text(changes_only=True)


def sum_of_folds(tree):
    total, above = 0, []
    for row in tree.folding.rows:
        del above[row.depth :]
        above.append(len(row.members) * (above[-1] if above else 1))
        total += above[-1]
    return total
