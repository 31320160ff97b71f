"""Marks on a tree: what the plan says, module by module."""

from __future__ import annotations

import pytest
from torch import nn

from patchlab.mapping.rules import PatchMapping
from patchlab.model.tree import module_tree
from patchlab.notebook.tree_marks import marks_of
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.plan.findings import Finding
from patchlab.plan.plan import PatchPlan, grouped


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(2, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self = SelfAttention()
        self.dropout = nn.Dropout()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.cross = SelfAttention()


class Mine(nn.Module):
    pass


class Yours(nn.Module):
    pass


MODEL = nn.Sequential(Layer(), Layer())
TREE = module_tree(MODEL)
CONTAINER = Finding("PL101", "error", ".*Attention", "Attention", "holds SelfAttention")


def plan_of(mapping):
    rules = PatchMapping.of(mapping)
    found = [
        (fqn, type(module), rules.find(type(module).__name__))
        for fqn, module in MODEL.named_modules()
    ]
    return PatchPlan(rules, grouped(item for item in found if item[2] is not None))


def test_every_module_that_a_rule_replaces_is_marked_with_the_kind_of_its_key():
    found = marks_of(plan_of({"SelfAttention": Mine, "^Drop": Mine}), TREE)

    states = {
        fqn: found.marks[fqn] for fqn in ("0.attention.self", "1.cross", "0.attention.dropout")
    }
    assert states == {
        "0.attention.self": "exact",
        "1.cross": "exact",
        "0.attention.dropout": "pattern",
    }
    assert (
        set(found.marks)
        == set(found.reasons)
        == set(plan_of({"SelfAttention": Mine, "^Drop": Mine}).fqns)
    )
    assert found.reasons["1.cross"] == "'SelfAttention' (exact name) puts Mine here."


def test_all_that_is_inside_a_container_is_swallowed_and_nothing_else():
    found = marks_of(plan_of({".*Attention": Mine}), TREE, [CONTAINER])

    assert found.marks["0.attention"] == "container"
    inside = {fqn for fqn, state in found.marks.items() if state == "swallowed"}
    expected = {fqn for fqn in TREE.fqns if fqn.startswith(("0.attention.", "1.attention."))}
    assert inside == expected
    assert found.marks["0.cross"] == "pattern"


@pytest.mark.parametrize(
    "finding",
    [
        Finding("PL101", "warning", ".*Attention", "Attention", "keeps what it holds"),
        Finding("PL201", "error", ".*Attention", "Attention", "does not bind"),
        Finding("PL101", "error", "another", "Attention", "is about another rule"),
    ],
)
def test_only_an_error_about_this_rule_makes_a_container(finding):
    marks = marks_of(plan_of({".*Attention": Mine}), TREE, [finding]).marks

    assert set(marks.values()) == {"pattern"}


def test_key_that_is_typed_is_marked_alone_and_shadowed_where_another_decides():
    plan = plan_of({"SelfAttention": Mine, ".*Attention$": Yours, "Dropout": Mine})

    marks = marks_of(plan, TREE, key=".*Attention$").marks
    assert marks["0.attention"] == "pattern"
    assert marks["0.cross"] == "shadowed"
    assert "0.attention.dropout" not in marks
    assert marks_of(plan, TREE).marks["0.cross"] == "exact"


def test_marks_fit_the_widget():
    found = marks_of(plan_of({".*Attention": Mine}), TREE, [CONTAINER])
    widget = TreeWidget(TREE)
    widget.set_highlight(found.marks, reasons=found.reasons)
    widget.selected = "0.attention"

    assert widget.details["rule"] == "'.*Attention' (pattern) puts Mine here."
