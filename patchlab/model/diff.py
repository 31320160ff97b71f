"""The difference between two module trees, child by child, told by class identity.

Children are matched by name, and what wraps a model (`torch.compile`, `DataParallel`) is looked
through. A module that is of another class on the other side is *replaced*, even where both classes
have one name; one of the same class with other tensors, sharing or ties is *changed*. `apply_diff`
makes the after tree from the before tree and the difference; that it does is a property in the
tests, so a difference tells everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from patchlab.model.diff_table import diff_table, fold_diff
from patchlab.model.folding import Folding
from patchlab.model.nodes import ModuleNode, ModuleState
from patchlab.model.tree import ModuleTree, module_tree
from patchlab.model.walk import Columns, subtree_totals
from patchlab.render.frames import frame_of
from patchlab.render.rows import Table
from patchlab.render.shown import Shown

__all__ = ["DiffRow", "Status", "TreeDiff", "apply_diff", "diff_trees"]

Status = Literal["same", "added", "removed", "replaced", "changed"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One module of either tree.

    Attributes:
        fqn: Its path without wrapper prefixes, in both trees.
        parent: The place of its parent's row, -1 for the root.
        depth: 0 for the root.
        status: "same" speaks of the module itself, not of those below it.
        before: The module in the before tree, None if it was added.
        after: The module in the after tree, None if it was removed.
        changes: What is different about tensors, sharing and ties, one phrase each.
    """

    fqn: str
    parent: int
    depth: int
    status: Status
    before: ModuleNode | None
    after: ModuleNode | None
    changes: tuple[str, ...] = ()

    @property
    def node(self) -> ModuleNode:
        """The module after, or before if it was removed."""
        node = self.after or self.before
        assert node is not None, "a row is about a module of at least one tree"
        return node

    @property
    def name(self) -> str:
        """The last part of the FQN."""
        return self.node.name

    @property
    def before_class(self) -> str | None:
        """The class name before, None if the module was added."""
        return self.before.class_name if self.before else None

    @property
    def after_class(self) -> str | None:
        """The class name after, None if the module was removed."""
        return self.after.class_name if self.after else None


@dataclass(frozen=True, repr=False)
class TreeDiff(Shown):
    """The difference between two module trees; made by `diff_trees`.

    Attributes:
        rows: A row for every module of either tree, in the order of the after tree; a removed one
            stands behind the sibling that it followed.
    """

    rows: tuple[DiffRow, ...]

    @property
    def changes(self) -> tuple[DiffRow, ...]:
        """The rows that are not "same"."""
        return tuple(row for row in self.rows if row.status != "same")

    @property
    def is_empty(self) -> bool:
        """Whether the trees are the same."""
        return not self.changes

    @cached_property
    def counts(self) -> Mapping[Status, int]:
        """The number of modules of each status, 0 included."""
        found = Counter(row.status for row in self.rows)
        return {status: found[status] for status in STATUSES}

    @cached_property
    def folding(self) -> Folding:
        """Which rows are equal, for text, HTML and widget alike: one pass over the rows."""
        return fold_diff(self.rows)

    def find(self, fqn: str) -> DiffRow | None:
        """Return the row of a path, None if neither tree has it."""
        return self._by_fqn.get(fqn)

    def to_table(self, *, changes_only: bool = False, folded: bool = True) -> Table:
        """Return the rows in which the difference is shown.

        Args:
            changes_only: Leave out what is the same and holds no change.
            folded: Whether equal siblings become one row.
        """
        return diff_table(self, changes_only=changes_only, folded=folded)

    def to_frame(self) -> Any:
        """Return a pandas frame with one row for every module of either tree."""
        rows = self.rows
        return frame_of(
            {
                "fqn": [row.fqn for row in rows],
                "status": [row.status for row in rows],
                "before_class": [row.before_class for row in rows],
                "after_class": [row.after_class for row in rows],
                "before_parameters": [row.before and row.before.num_parameters for row in rows],
                "after_parameters": [row.after and row.after.num_parameters for row in rows],
                "changes": ["; ".join(row.changes) for row in rows],
            }
        )

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_fqn(self) -> dict[str, DiffRow]:
        return {row.fqn: row for row in reversed(self.rows)}


def diff_trees(before: Any, after: Any) -> TreeDiff:
    """Compare two trees or models.

    Raises:
        TargetError: One of them is neither a `ModuleTree` nor an `nn.Module`.
    """
    old, new = (
        (side if isinstance(side, ModuleTree) else module_tree(side)).unwrapped()
        for side in (before, after)
    )
    rows: list[DiffRow] = []
    stack: list[tuple[ModuleNode | None, ModuleNode | None, int]] = [(old.root, new.root, -1)]
    while stack:
        left, right, parent = stack.pop()
        place = len(rows)
        rows.append(_compare(left, right, parent))
        pairs = _pair(
            old.children(left) if left else (),
            new.children(right) if right else (),
        )
        stack.extend((a, b, place) for a, b in reversed(pairs))
    return TreeDiff(tuple(rows))


def apply_diff(before: ModuleTree, diff: TreeDiff) -> ModuleTree:
    """Return the after tree of a difference, without wrappers.

    What is the same is taken from `before` and the rest from the difference.

    Raises:
        TargetError: `diff` is not a difference from this tree.
    """
    source = before.unwrapped()
    columns = Columns()
    kinds: dict[int, int] = {}
    states: dict[ModuleState, int] = {}
    place: dict[int, int] = {}
    nodes: list[ModuleNode] = []
    for row_place, row in enumerate(diff.rows):
        if row.status == "removed":
            continue
        node = source.find(row.fqn) if row.status == "same" else row.node
        place[row_place] = len(nodes)
        nodes.append(node)
        columns.names.append(node.name)
        columns.parents.append(place[row.parent] if row.parent >= 0 else -1)
        if node.cls_id not in kinds:
            kinds[node.cls_id] = len(columns.classes)
            columns.classes.append(node.record)
        columns.kinds.append(kinds[node.cls_id])
        state = ModuleState(node.parameters, node.buffers)
        if state not in states:
            states[state] = len(columns.state_table)
            columns.state_table.append(state)
        columns.states.append(states[state])
    _write_sharing(columns, nodes)
    return ModuleTree.from_columns(columns)


def _compare(left: ModuleNode | None, right: ModuleNode | None, parent: int) -> DiffRow:
    changes: tuple[str, ...] = ()
    status: Status
    if left is None:
        status = "added"
    elif right is None:
        status = "removed"
    else:
        changes = _changes(left, right)
        status = "changed" if changes else "same"
        if left.cls_id != right.cls_id:
            status = "replaced"
    node = right or left
    assert node is not None
    return DiffRow(node.fqn, parent, node.depth, status, left, right, changes)


def _changes(left: ModuleNode, right: ModuleNode) -> tuple[str, ...]:
    found: list[str] = []
    for word, old, new in (
        ("", left.parameters, right.parameters),
        ("buffer ", left.buffers, right.buffers),
    ):
        if old == new:
            continue
        olds, news = {r.name: r for r in old}, {r.name: r for r in new}
        if olds == news:
            found.append(f"{word.strip() or 'parameter'}s in another order")
        for name in dict.fromkeys((*olds, *news)):
            a, b = olds.get(name), news.get(name)
            if a is None or b is None:
                found.append(f"{word}{a or b} {'added' if a is None else 'removed'}")
            elif a != b:
                kept = ("", " not in the state dict")
                found.append(
                    f"{word}{a}{kept[not a.persistent]} → {str(b).removeprefix(name).strip()}"
                    f"{kept[not b.persistent]}"
                )
    if (left.shared_with, left.is_cycle) != (right.shared_with, right.is_cycle):
        found.append(f"shared with {_place(left)} → {_place(right)}")
    if left.tied != right.tied:
        found.append(f"tied: {_tied(left)} → {_tied(right)}")
    return tuple(found)


def _place(node: ModuleNode) -> str:
    return "nothing" if node.shared_with is None else node.shared_with or "the root"


def _tied(node: ModuleNode) -> str:
    return ", ".join(f"{own} to {other}" for own, other in node.tied) or "nothing"


def _pair(
    old: Sequence[ModuleNode], new: Sequence[ModuleNode]
) -> list[tuple[ModuleNode | None, ModuleNode | None]]:
    """Pair children by name, in the order of the new ones, removed ones behind their neighbors."""
    olds, names = {node.name: node for node in old}, {node.name for node in new}
    removed: dict[str | None, list[ModuleNode]] = {}
    kept: str | None = None
    for node in old:
        if node.name in names:
            kept = node.name
        else:
            removed.setdefault(kept, []).append(node)
    pairs: list[tuple[ModuleNode | None, ModuleNode | None]] = []
    pairs += ((node, None) for node in removed.get(None, ()))
    for node in new:
        pairs.append((olds.get(node.name), node))
        pairs += ((gone, None) for gone in removed.get(node.name, ()))
    return pairs


def _write_sharing(columns: Columns, nodes: Sequence[ModuleNode]) -> None:
    """Fill in sharing, ties and totals from what the nodes say about them."""
    fqns = ModuleTree.from_columns(columns).fqns
    index_of = {fqn: index for index, fqn in reversed(list(enumerate(fqns)))}
    tensors: list[tuple[int, Hashable, int]] = []
    first: dict[tuple[int, str], tuple[int, str]] = {}
    for index, node in enumerate(nodes):
        if node.shared_with is not None:
            columns.shared[index] = index_of[node.shared_with]
        if node.is_cycle:
            columns.cycles.add(index)
        ties = []
        for own, full in node.tied:
            fqn, _, name = full.rpartition(".")
            ties.append((own, index_of[fqn], name))
            first[index, own] = (index_of[fqn], name)
        if ties:
            columns.ties[index] = tuple(ties)
        origin = columns.shared.get(index, index)
        for record in node.parameters:
            identity = first.get((origin, record.name), (origin, record.name))
            tensors.append((index, identity, record.numel))
    owned = [sum(record.numel for record in node.parameters) for node in nodes]
    columns.totals, _ = subtree_totals(columns.parents, owned, tensors)
    for index in columns.cycles:
        columns.totals[index] = columns.totals[columns.shared[index]]
