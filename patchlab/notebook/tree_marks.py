"""Marks: what a plan says about each module of the tree that is on the screen.

The browser matches nothing. Which rule decides a module comes from the plan, which class is a
container from the findings, and what is inside one is swallowed with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from patchlab.mapping.matching import explain_match
from patchlab.model.tree import ModuleTree
from patchlab.plan.findings import Finding
from patchlab.plan.plan import PatchPlan, Replacement
from patchlab.render.payload import MarkState
from patchlab.verify.preview import Preview

# Findings that say that what is inside a module goes with it; told as such where they are errors.
CONTAINER_CODES = frozenset({"PL101", "PL106", "PL107"})


@dataclass(frozen=True)
class TreeMarks:
    """The arguments of `TreeWidget.set_highlight`.

    Attributes:
        marks: FQN → state; modules that no rule reaches are left out.
        reasons: FQN → which rule decides the module, in a sentence.
    """

    marks: dict[str, MarkState] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def marks_of(
    plan: PatchPlan, tree: ModuleTree, findings: Iterable[Finding] = (), *, key: str | None = None
) -> TreeMarks:
    """Say what a plan does to each module of a tree.

    Args:
        plan: Made for the model that the tree is of; FQNs that the tree does not have are passed
            over.
        tree: The tree before.
        findings: Those of the plan; they name the containers.
        key: Mark only what this key has to do with, as while it is typed: what it decides, and as
            "shadowed" what it fits in vain. None for all rules.
    """
    containers = {
        (item.key, item.subject)
        for item in findings
        if item.code in CONTAINER_CODES and item.severity == "error"
    }
    decided = plan.fqns
    shadowed = _shadowed_classes(plan, tree, key)
    found = TreeMarks()
    # Depth of the container that the rows after it are in, until one is not deeper.
    inside = None
    for fqn, depth, kind in zip(tree.fqns, tree.depths, tree.kinds, strict=True):
        if inside is not None and depth > inside:
            found.marks[fqn] = "swallowed"
            continue
        inside = None
        replacement = decided.get(fqn)
        if replacement is not None and key in (None, replacement.key):
            found.reasons[fqn] = _reason(replacement)
            found.marks[fqn] = "exact" if replacement.rule.is_exact else "pattern"
            if (replacement.key, tree.classes[kind].name) in containers:
                found.marks[fqn] = "container"
                inside = depth
        elif replacement is not None and tree.classes[kind].name in shadowed:
            found.marks[fqn] = "shadowed"
            found.reasons[fqn] = _reason(replacement)
    return found


def preview_marks(preview: Preview) -> TreeMarks:
    """Say what a preview found about each module, as its own table marks it."""
    decided = preview.plan.fqns
    found = TreeMarks(reasons={fqn: _reason(item) for fqn, item in decided.items()})
    for fqn, mark in preview.marks.items():
        if mark.tone == "struck":
            found.marks[fqn] = "swallowed"
            found.reasons.pop(fqn, None)  # The rule puts nothing where nothing is left.
        elif mark.tone == "error":
            found.marks[fqn] = "container"
        else:
            found.marks[fqn] = "exact" if decided[fqn].rule.is_exact else "pattern"
    return found


def _shadowed_classes(plan: PatchPlan, tree: ModuleTree, key: str | None) -> set[str]:
    """Return the classes that `key` fits and another rule decides."""
    if key is None:
        return set()
    names = {record.name for record in tree.classes}
    return {
        name
        for name in names
        if any(rule.key == key for rule in explain_match(name, plan.mapping).shadowed)
    }


def _reason(replacement: Replacement) -> str:
    how = "exact name" if replacement.rule.is_exact else "pattern"
    return f"{replacement.key!r} ({how}) puts {replacement.replacement.__name__} here."
