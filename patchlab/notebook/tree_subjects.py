"""What a tree widget shows: one tree, or the difference between two.

Each subject says the same things in its own way: its columns for the browser, the FQN of each row,
the details of one module, and its static twin.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from patchlab.model.diff import DiffRow, TreeDiff
from patchlab.model.diff_table import diff_caption
from patchlab.model.nodes import ClassRecord, ModuleNode, TensorRecord
from patchlab.model.tree import ModuleTree, join_fqn
from patchlab.model.tree_table import class_labels, lazy_nodes, tree_caption
from patchlab.render.payload import UNINITIALIZED, TreeColumns
from patchlab.render.rows import Mark, Table


@dataclass(frozen=True)
class Details:
    """What the details pane shows of a module.

    Attributes:
        sides: The module in each of the trees, or once where they agree.
        notes: Sentences on sharing, ties and changes.
        class_names: Of the sides; findings about them are shown.
    """

    sides: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    class_names: frozenset[str] = field(default_factory=frozenset)


class Subject(Protocol):
    """What a widget can show."""

    @property
    def caption(self) -> str:
        """One line on what it is of."""

    @property
    def fqns(self) -> Sequence[str]:
        """The FQN of each row."""

    def columns(self) -> TreeColumns:
        """Return the rows as columns."""

    def details(self, row: int) -> Details:
        """Describe the module of a row."""

    def table(self, marks: Mapping[str, Mark]) -> Table:
        """Return the rows of the static twin."""


@dataclass(frozen=True)
class TreeSubject:
    """One tree."""

    tree: ModuleTree

    @property
    def caption(self) -> str:
        """One line on what it is of."""
        return tree_caption(self.tree)

    @property
    def fqns(self) -> Sequence[str]:
        """The FQN of each row."""
        return self.tree.fqns

    def columns(self) -> TreeColumns:
        """Return the rows as columns."""
        tree = self.tree
        params: Sequence[int] = tree.totals
        lazy = lazy_nodes(tree)
        if lazy:
            params = [
                UNINITIALIZED if not total and node in lazy else total
                for node, total in enumerate(params)
            ]
        return TreeColumns(
            names=tree.names,
            depths=tree.depths,
            shapes=tree.folding.shapes,
            classes=_class_table(tree.classes),
            before=tree.kinds,
            params_before=params,
            shared=dict(tree.shared),
            tied={node: ties[0][1] for node, ties in tree.ties if ties[0][1] != node},
        )

    def details(self, row: int) -> Details:
        """Describe the module of a row."""
        node = self._node(row)
        return Details((_side("", node),), _notes(node), frozenset({node.class_name}))

    def table(self, marks: Mapping[str, Mark]) -> Table:
        """Return the rows of the static twin."""
        return self.tree.to_table(marks=marks)

    def _node(self, row: int) -> ModuleNode:
        # Not `tree.nodes[row]`: that makes a record of every module, 0.3 s for 50,000, while
        # somebody waits for one.
        tree = self.tree
        held, first = tree.state_table[tree.states[row]], dict(tree.shared).get(row)
        return ModuleNode(
            index=row,
            parent=tree.parents[row],
            depth=tree.depths[row],
            fqn=tree.fqns[row],
            name=tree.names[row],
            record=tree.classes[tree.kinds[row]],
            num_parameters=tree.totals[row],
            parameters=held.parameters,
            buffers=held.buffers,
            shared_with=None if first is None else tree.fqns[first],
            is_cycle=row in tree.cycles,
            tied=tuple(
                (own, join_fqn(tree.fqns[node], other))
                for own, node, other in dict(tree.ties).get(row, ())
            ),
        )


@dataclass(frozen=True)
class DiffSubject:
    """Two trees, put one upon the other."""

    diff: TreeDiff

    @property
    def caption(self) -> str:
        """One line on what it is of."""
        return diff_caption(self.diff)

    @property
    def fqns(self) -> Sequence[str]:
        """The FQN of each row."""
        return [row.fqn for row in self.diff.rows]

    def columns(self) -> TreeColumns:
        """Return the rows as columns."""
        rows = self.diff.rows
        records = {
            node.cls_id: node.record for row in rows for node in (row.before, row.after) if node
        }
        place = {cls_id: index for index, cls_id in enumerate(records)}
        row_of = {row.fqn: index for index, row in enumerate(rows)}
        return TreeColumns(
            names=[row.name for row in rows],
            depths=[row.depth for row in rows],
            shapes=self.diff.folding.shapes,
            classes=_class_table(records.values()),
            before=[place[row.before.cls_id] if row.before else -1 for row in rows],
            after=[place[row.after.cls_id] if row.after else -1 for row in rows],
            params_before=[row.before.num_parameters if row.before else 0 for row in rows],
            params_after=[row.after.num_parameters if row.after else 0 for row in rows],
            statuses=[row.status for row in rows],
            shared={
                index: row_of[row.node.shared_with]
                for index, row in enumerate(rows)
                if row.node.shared_with in row_of
            },
            tied={index: row_of[other] for index, other in _ties(rows) if other in row_of},
        )

    def details(self, row: int) -> Details:
        """Describe the module of a row."""
        item = self.diff.rows[row]
        return Details(
            _sides(item),
            (*(f"Changed: {change}." for change in item.changes), *_notes(item.node)),
            frozenset(node.class_name for node in (item.before, item.after) if node),
        )

    def table(self, marks: Mapping[str, Mark]) -> Table:
        """Return the rows of the static twin; a difference has no marks of its own."""
        return self.diff.to_table()


def _ties(rows: Sequence[DiffRow]) -> Iterator[tuple[int, str]]:
    """Yield each row with tied parameters and the FQN of the module that has the first of them."""
    for index, row in enumerate(rows):
        for _, other in row.node.tied[:1]:
            fqn = other.rpartition(".")[0]
            if fqn != row.fqn:
                yield index, fqn


def _sides(row: DiffRow) -> tuple[dict[str, Any], ...]:
    if row.status == "same":
        return (_side("", row.node),)
    sides = [("Before", row.before), ("After", row.after)]
    return tuple(_side(title, node) for title, node in sides if node is not None)


def _notes(node: ModuleNode) -> tuple[str, ...]:
    notes = []
    if node.is_cycle:
        notes.append(f"A module inside itself: it goes back to {node.shared_with or 'the root'}.")
    elif node.shared_with is not None:
        notes.append(f"The same module as {node.shared_with or 'the root'}.")
    notes += [f"{own} is tied to {other}." for own, other in node.tied]
    if node.stale:
        notes.append(f"{node.class_name} has been defined again since this module was built.")
    return tuple(notes)


def _class_table(records: Iterable[ClassRecord]) -> list[tuple[str, str]]:
    classes = tuple(records)
    labels = class_labels(classes)
    return [(label, item.python_module) for label, item in zip(labels, classes, strict=True)]


def _side(title: str, node: ModuleNode) -> dict[str, Any]:
    return {
        "title": title,
        "class_name": node.class_name,
        "python_module": node.python_module,
        "signature": _signature(node.cls),
        "parameters": [_tensor(record) for record in node.parameters],
        "buffers": [_tensor(record) for record in node.buffers],
        "num_parameters": node.num_parameters,
    }


def _tensor(record: TensorRecord) -> list[str]:
    shape = (
        "uninitialized" if record.shape is None else " × ".join(map(str, record.shape)) or "scalar"
    )
    kept = "" if record.persistent else ", not saved"
    return [record.name, shape, f"{record.dtype}{kept}"]


def _signature(cls: type) -> str:
    """Return the constructor's parameters as `(config, layer_idx=None)`; "" if they are not known.

    Annotations are left out: long, and of no use for telling whether a call binds.
    """
    try:
        parameters = list(inspect.signature(cls).parameters.values())
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        text = str(inspect.Signature(bare))
    except Exception:  # noqa: BLE001 - runs the `repr` of defaults, which may raise anything
        return ""
    # `<function gelu at 0x7f…>`: an address differs on every run.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
