"""The difference between two trees: it tells everything, and tells it by class identity."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from transformers import AutoModel

from patchlab.errors import TargetError
from patchlab.model.diff import apply_diff, diff_trees
from patchlab.model.tree import module_tree
from tests import toys
from tests.toy_trees import NamesakeToy, OtherToy, Toy, changed_models, toy_models


@given(changed_models())
def test_before_and_difference_make_after(models):
    before, after = map(module_tree, models)
    made = apply_diff(before, diff_trees(before, after))

    assert made == after
    assert made.totals == after.totals


@given(toy_models(), toy_models())
@settings(max_examples=50)
def test_before_and_difference_make_after_for_models_without_relation(one, other):
    before, after = module_tree(one), module_tree(other)

    assert apply_diff(before, diff_trees(before, after)) == after


@given(changed_models())
def test_a_difference_is_empty_only_between_equal_trees(models):
    before, after = map(module_tree, models)

    assert diff_trees(before, after).is_empty == (before == after)


@given(changed_models())
def test_turning_a_difference_round_turns_added_and_removed_round(models):
    there, back = diff_trees(*models).counts, diff_trees(*reversed(models)).counts

    assert (there["added"], there["removed"]) == (back["removed"], back["added"])
    assert [there[s] for s in ("same", "replaced", "changed")] == [
        back[s] for s in ("same", "replaced", "changed")
    ]


@given(changed_models())
def test_every_module_of_either_tree_has_one_row(models):
    before, after = map(module_tree, models)
    diff = diff_trees(before, after)

    assert [row.after.index for row in diff.rows if row.after] == list(range(len(after)))
    assert sorted(row.before.index for row in diff.rows if row.before) == list(range(len(before)))
    assert sum(diff.counts.values()) == len(diff) == len(diff.rows)


@given(changed_models())
@settings(max_examples=50)
def test_changes_only_shows_every_change_and_nothing_that_holds_none(models):
    diff = diff_trees(*models)
    rows = diff.to_table(changes_only=True, folded=False).rows

    assert sum(bool(row.mark) for row in rows) == len(diff.changes)
    for place, row in enumerate(rows):
        below = rows[place + 1].depth > row.depth if place + 1 < len(rows) else False
        assert row.mark or below


@given(changed_models())
@settings(max_examples=50)
def test_folding_a_difference_leaves_no_change_out(models):
    diff = diff_trees(*models)
    total, above = 0, []
    for row in diff.to_table().rows:
        del above[row.depth :]
        above.append(row.fold * (above[-1] if above else 1))
        total += above[-1] if row.mark else 0

    assert total == len(diff.changes)


def statuses(before, after):
    return {row.fqn: row.status for row in diff_trees(before, after).rows}


def test_same_name_and_different_class_is_replaced():
    before, after = nn.Sequential(Toy()), nn.Sequential(NamesakeToy())

    assert statuses(before, after) == {"": "same", "0": "replaced"}
    assert "Toy (toy_trees)" in diff_trees(before, after).to_text()


def test_other_shape_dtype_or_buffer_is_changed():
    before = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    after = copy.deepcopy(before)
    after[0].weight = nn.Parameter(torch.zeros(3, 2))
    after[1].half()
    after[2].register_buffer("running_mean", None)

    diff = diff_trees(before, after)

    assert [row.status for row in diff.rows] == ["same", *["changed"] * 3, "same"]
    assert diff.rows[1].changes == ("weight (2, 2) float32 → (3, 2) float32",)
    assert diff.rows[2].changes[0] == "weight (2, 2) float32 → (2, 2) float16"
    assert diff.rows[3].changes == ("buffer running_mean (2) float32 removed",)


def test_a_tie_that_is_lost_is_a_change():
    before = Toy()
    before.embed, before.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
    after = copy.deepcopy(before)
    before.head.weight = before.embed.weight

    (row,) = diff_trees(before, after).changes

    assert (row.fqn, row.status) == ("head", "changed")
    assert row.changes == ("tied: weight to embed.weight → nothing",)


def test_a_tie_that_stays_is_noted_and_no_change():
    def tied(activation):
        model = Toy()
        model.embed, model.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        model.head.weight = model.embed.weight
        model.act = activation
        return model

    diff = diff_trees(tied(nn.GELU()), tied(nn.ReLU()))

    assert [row.fqn for row in diff.changes] == ["act"]
    assert [row.note for row in diff.to_table().rows if row.label == "head"] == [
        "weight tied to embed"
    ]
    assert [row.note for row in diff.to_table().rows if row.label == "embed"] == [""]


def test_added_and_removed_children_keep_their_neighbors():
    before, after = Toy(), Toy()
    for name in ("q", "k", "v", "o"):
        before.add_module(name, nn.Linear(2, 2))
    for name in ("qkv", "o"):
        after.add_module(name, nn.Linear(2, 2))

    assert list(statuses(before, after).items()) == [
        ("", "same"),
        ("q", "removed"),
        ("k", "removed"),
        ("v", "removed"),
        ("qkv", "added"),
        ("o", "same"),
    ]


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")]
)
def test_a_wrapper_is_no_difference(wrap):
    model = nn.Sequential(nn.Linear(2, 2))

    assert diff_trees(model, wrap(model)).is_empty
    assert [row.fqn for row in diff_trees(wrap(model), model).rows] == ["", "0"]


def test_an_empty_difference_says_so():
    text = diff_trees(Toy(), Toy()).to_text()

    assert text.startswith("No difference: 1 module in Toy, all the same")
    assert diff_trees(Toy(), Toy()).to_text(changes_only=True) == text.splitlines()[0]
    assert not diff_trees(Toy(), OtherToy()).to_text().startswith("No difference")


def test_cycles_and_lazy_parameters_are_compared():
    before = nn.Sequential(nn.LazyLinear(2))
    before.add_module("me", before)
    after = copy.deepcopy(before)

    assert diff_trees(before, after).is_empty
    after[0] = nn.LazyLinear(2, bias=False)
    assert diff_trees(before, after).find("0").changes == ("bias uninitialized float32 removed",)


@pytest.mark.parametrize("sides", [(None, Toy()), (Toy(), "bert"), (Toy, Toy())])
def test_what_is_neither_tree_nor_model_is_refused(sides):
    with pytest.raises(TargetError, match=r"must be a torch\.nn\.Module"):
        diff_trees(*sides)


@pytest.mark.parametrize("config", [toys.bert_config(), toys.llama_config()])
def test_replaced_attention_is_all_that_differs_and_folds(config):
    before = AutoModel.from_config(config)
    after = copy.deepcopy(before)
    name, module = next(
        (n, m) for n, m in before.named_modules() if type(m).__name__.endswith("Attention")
    )
    last = name.rpartition(".")[2]
    for parent in list(after.modules()):
        if last in parent._modules:
            parent._modules[last] = Toy()
    diff = diff_trees(before, after)

    assert diff.counts["replaced"] == config.num_hidden_layers
    assert {row.before_class for row in diff.rows if row.status == "replaced"} == {
        type(module).__name__
    }
    assert sum(row.note == "replaced" for row in diff.to_table().rows) == 1


def test_the_frame_has_a_row_for_every_module_of_either():
    frame = diff_trees(nn.Sequential(Toy()), nn.Sequential(nn.Linear(1, 1), Toy())).to_frame()

    assert list(frame["status"]) == ["same", "replaced", "added"]
    assert list(frame["after_class"]) == ["Sequential", "Linear", "Toy"]
