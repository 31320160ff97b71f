"""The rows in which a module tree is shown: what is folded, what each row says."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from patchlab.model.folding import Fold, Folding, fold
from patchlab.model.nodes import ClassRecord
from patchlab.render.numbers import count, exact, human
from patchlab.render.rows import Column, Mark, Row, Table

if TYPE_CHECKING:
    from patchlab.model.tree import ModuleTree

COLUMNS = (Column("Module", mono=True), Column("Class", mono=True), Column("Parameters", "right"))
_NO_MARK = Mark("plain")


def tree_table(tree: ModuleTree, marks: Mapping[str, Mark], *, folded: bool) -> Table:
    """Make the table of a tree; see `ModuleTree.to_table`."""
    marked = _marked(tree, marks)
    if not folded:
        folds = _unfolded(tree)
    else:
        folds = (fold_tree(tree, marked) if marked else tree.folding).rows
    writer = _RowWriter(tree, marked)
    return Table(
        columns=COLUMNS,
        rows=tuple(writer.row(item) for item in folds),
        caption=tree_caption(tree),
        footer=_footer(tree),
        note_title="Note",
    )


def fold_tree(tree: ModuleTree, marked: Mapping[int, Mark] | None = None) -> Folding:
    """Fold a tree by class identity, tensors, sharing, ties and marks.

    `ModuleTree.folding` is this without marks, and worked out once.
    """
    keys = fold_keys(tree)
    for node, mark in (marked or {}).items():
        keys[node] = (keys[node], mark)
    return fold(tree.parents, tree.names, keys)


def fold_keys(tree: ModuleTree) -> list[Hashable]:
    """Say what each module is, without its name and children, as `folding.fold` wants it."""
    keys: list[Hashable] = list(zip(tree.kinds, tree.states, strict=True))
    for node, first in tree.shared:
        # Which module is shared matters where it has parameters. One activation object in twelve
        # layers must not keep the layers apart.
        keys[node] = (keys[node], "shared", first if tree.totals[node] else -1)
        if not tree.totals[node]:
            keys[first] = keys[node]
    for node in tree.cycles:
        keys[node] = (keys[node], "cycle")
    for node, ties in tree.ties:
        keys[node] = (keys[node], ties)
    return keys


def tree_caption(tree: ModuleTree) -> str:
    """Say in one line what the tree is of."""
    name = tree.classes[tree.kinds[0]].name
    modules = count(len(tree) - len(tree.shared), "module")
    paths = f" at {count(len(tree), 'path')}" if tree.shared else ""
    return f"{name} · {modules}{paths} · {human(tree.num_parameters)} parameters"


def class_labels(classes: Sequence[ClassRecord]) -> tuple[str, ...]:
    """Name each class so that different ones read differently where they can.

    Where several have one name, the last part of the Python module is added, or all of it.
    """
    alike: dict[str, set[int]] = {}
    for record in classes:
        for text in (record.name, _short(record), _long(record)):
            alike.setdefault(text, set()).add(record.cls_id)
    labels = []
    for record in classes:
        texts = (record.name, _short(record), _long(record))
        label = next((text for text in texts if len(alike[text]) == 1), texts[1])
        labels.append(f"{label} (older)" if record.stale else label)
    return tuple(labels)


def _short(record: ClassRecord) -> str:
    return f"{record.name} ({record.python_module.rpartition('.')[2]})"


def _long(record: ClassRecord) -> str:
    return f"{record.name} ({record.python_module})"


def _marked(tree: ModuleTree, marks: Mapping[str, Mark]) -> dict[int, Mark]:
    if not marks:
        return {}
    return {index: marks[fqn] for index, fqn in enumerate(tree.fqns) if fqn in marks}


def _unfolded(tree: ModuleTree) -> tuple[Fold, ...]:
    return tuple(
        Fold(index, (index,), depth, name)
        for index, (name, depth) in enumerate(zip(tree.names, tree.depths, strict=True))
    )


class _RowWriter:
    """Writes the row of a fold; holds what all rows of one tree need."""

    def __init__(self, tree: ModuleTree, marked: Mapping[int, Mark]) -> None:
        self._tree = tree
        self._marked = marked
        self._labels = class_labels(tree.classes)
        self._shared = dict(tree.shared)
        self._ties = dict(tree.ties)
        self._cycles = frozenset(tree.cycles)
        self._lazy = lazy_nodes(tree)
        self._several = frozenset(
            node
            for pair in tree.shared
            if not tree.totals[pair[0]] and pair[0] not in self._cycles
            for node in pair
        )

    def row(self, item: Fold) -> Row:
        tree, index = self._tree, item.index
        mark = self._marked.get(index, _NO_MARK)
        kind = tree.kinds[index]
        label, total = self._labels[kind], tree.totals[index]
        notes = self._notes(index)
        is_cycle = index in self._cycles
        return Row(
            depth=item.depth,
            label=item.label if item.depth else tree.classes[kind].name,
            cells=(
                f"{label} → {mark.becomes}" if mark.becomes else label,
                "uninitialized" if not total and index in self._lazy else _number(total),
            ),
            tone="dim" if is_cycle and mark is _NO_MARK else mark.tone,
            fold=len(item.members),
            mark=mark.mark or ("↺" if is_cycle else ""),
            note=" · ".join([mark.note, *notes] if mark.note else notes),
            title=self._title(item),
        )

    def _notes(self, index: int) -> list[str]:
        tree, notes = self._tree, []
        first = self._shared.get(index)
        if index in self._cycles:
            notes.append(f"back to {tree.fqns[first or 0] or 'the root'}")
        elif index in self._several:
            notes.append("shared")
        elif first is not None and not self._is_below_shared(index, first):
            notes.append(f"shared with {tree.fqns[first]}")
        for own, node, other in self._ties.get(index, ()):
            notes.append(tie_note(own, tree.fqns[node], other))
        if tree.classes[tree.kinds[index]].stale:
            notes.append("class defined again since")
        return notes

    def _is_below_shared(self, index: int, first: int) -> bool:
        """Tell whether the parent is shared with the same module's parent, and so says it."""
        parents = self._tree.parents
        return self._shared.get(parents[index], -1) == parents[first] and parents[index] > 0

    def _title(self, item: Fold) -> str:
        tree, index = self._tree, item.index
        record, state = tree.classes[tree.kinds[index]], tree.state_table[tree.states[index]]
        each = " each" if len(item.members) > 1 else ""
        parts = [
            *([tree.fqns[index]] if index else []),
            f"{record.python_module}.{record.name}",
            f"{exact(tree.totals[index])} parameters{each}",
            *map(str, state.parameters[:8]),
            *(f"buffer {buffer}" for buffer in state.buffers[:4]),
        ]
        return " · ".join(parts)


def tie_note(own: str, fqn: str, other: str) -> str:
    """Say what a parameter is tied to: "weight tied to embed", where both are called `weight`."""
    if own == other and fqn:
        return f"{own} tied to {fqn}"
    return f"{own} tied to {fqn}.{other}" if fqn else f"{own} tied to {other}"


def _number(total: int) -> str:
    return human(total) if total else ""


def lazy_nodes(tree: ModuleTree) -> frozenset[int]:
    """Return the nodes with parameters at or below them whose shape is not known."""
    lazy = {
        state
        for state, held in enumerate(tree.state_table)
        if any(record.shape is None for record in held.parameters)
    }
    found: set[int] = set()
    if lazy:
        for index in range(len(tree) - 1, -1, -1):
            if tree.states[index] in lazy:
                found.add(index)
            if index in found:
                found.add(tree.parents[index])
    return frozenset(found)


def _footer(tree: ModuleTree) -> tuple[str, ...]:
    lines = []
    if tree.cut:
        lines.append(f"{count(len(tree.cut), 'shared module')} not followed: too many repeats.")
    stale = sorted({record.name for record in tree.classes if record.stale})
    if stale:
        lines.append(
            f"{', '.join(stale)}: defined again since this model was built; build it again, or "
            f"swap the class in place, to use the new one."
        )
    return tuple(lines)
