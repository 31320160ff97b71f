"""The rows in which a difference between two trees is shown."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from patchlab.model.folding import Fold, Folding, fold
from patchlab.model.nodes import ModuleNode
from patchlab.model.tree_table import COLUMNS, class_labels, tie_note
from patchlab.render.numbers import count, exact, human
from patchlab.render.rows import Row, Table, Tone

if TYPE_CHECKING:
    from patchlab.model.diff import DiffRow, Status, TreeDiff

LOOKS: dict[Status, tuple[str, Tone]] = {
    "same": ("", "plain"),
    "added": ("+", "ok"),
    "removed": ("−", "struck"),
    "replaced": ("●", "match"),
    "changed": ("~", "warning"),
}


def diff_table(diff: TreeDiff, *, changes_only: bool, folded: bool) -> Table:
    """Make the table of a difference; see `TreeDiff.to_table`."""
    places = _holding_changes(diff.rows) if changes_only else list(range(len(diff.rows)))
    rows = [diff.rows[place] for place in places]
    labels = _labels(rows)
    if folded and not changes_only:
        folds: Sequence[Fold] = diff.folding.rows
    else:
        folds = _folds(diff.rows, places, folded)
    return Table(
        columns=COLUMNS,
        rows=tuple(_row(item, rows, labels) for item in folds),
        caption=diff_caption(diff),
        note_title="Change",
    )


def diff_caption(diff: TreeDiff) -> str:
    """Say in one line how much is different."""
    total = count(diff.counts["same"], "module")
    if diff.is_empty:
        return f"No difference: {total} in {diff.rows[0].node.class_name}, all the same"
    parts = [f"{number:,} {status}" for status, number in diff.counts.items() if number]
    root = diff.rows[0]
    names = dict.fromkeys(name for name in (root.before_class, root.after_class) if name)
    return f"{' → '.join(names)} · {' · '.join(parts[1:] if diff.counts['same'] else parts)}" + (
        f" · {diff.counts['same']:,} same" if diff.counts["same"] else ""
    )


def _holding_changes(rows: Sequence[DiffRow]) -> list[int]:
    kept: set[int] = set()
    for place in range(len(rows) - 1, -1, -1):
        if rows[place].status != "same" or place in kept:
            kept.update((place, rows[place].parent))
    return sorted(kept - {-1})


def _folds(rows: Sequence[DiffRow], places: Sequence[int], folded: bool) -> Sequence[Fold]:
    if not folded:
        return [
            Fold(new, (new,), rows[old].depth, rows[old].name) for new, old in enumerate(places)
        ]
    place_of = {old: new for new, old in enumerate(places)}
    kept = [rows[old] for old in places]
    return fold(
        [place_of.get(row.parent, -1) for row in kept],
        [row.name for row in kept],
        _fold_keys(kept),
    ).rows


def fold_diff(rows: Sequence[DiffRow]) -> Folding:
    """Fold the rows of a difference; `TreeDiff.folding` is this, worked out once."""
    return fold([row.parent for row in rows], [row.name for row in rows], _fold_keys(rows))


def _fold_keys(rows: Sequence[DiffRow]) -> list[Hashable]:
    """Say what each row is, without its name and children, as `folding.fold` wants it."""
    return [(row.status, row.changes, _key(row.before), _key(row.after)) for row in rows]


def _key(node: ModuleNode | None) -> Hashable:
    if node is None:
        return None
    # Which module is shared does not matter where it has no parameters; see `tree_table.fold_keys`.
    shared = node.shared_with if node.num_parameters else None
    held = (node.parameters, node.buffers, node.num_parameters)
    return (node.cls_id, *held, shared, node.is_cycle, node.tied)


def _labels(rows: Sequence[DiffRow]) -> dict[int, str]:
    records = {node.cls_id: node.record for row in rows for node in (row.before, row.after) if node}
    classes = tuple(records.values())
    return {
        record.cls_id: label for record, label in zip(classes, class_labels(classes), strict=True)
    }


def _row(item: Fold, rows: Sequence[DiffRow], labels: dict[int, str]) -> Row:
    row = rows[item.index]
    mark, tone = LOOKS[row.status]
    before, after = row.before, row.after
    # By number: two classes of one name, in one Python module, are still two.
    classes = dict.fromkeys(node.cls_id for node in (before, after) if node)
    totals = dict.fromkeys(node.num_parameters for node in (before, after) if node)
    return Row(
        depth=item.depth,
        label=item.label if item.depth else row.node.class_name,
        cells=(
            " → ".join(labels[number] for number in classes),
            " → ".join(human(total) if any(totals) else "" for total in totals),
        ),
        tone=tone,
        fold=len(item.members),
        mark=mark,
        note=_note(row),
        title=" · ".join(
            [
                *([row.fqn] if row.fqn else []),
                " → ".join(f"{exact(total)} parameters" for total in totals),
                *row.changes,
            ]
        ),
    )


def _note(row: DiffRow) -> str:
    if row.status == "same":
        ties = ((own, *other.rpartition(".")[::2]) for own, other in row.node.tied)
        return " · ".join(tie_note(*tie) for tie in ties)
    if not row.changes or row.status == "replaced":
        return row.status
    more = f" and {len(row.changes) - 1} more" if len(row.changes) > 1 else ""
    return f"{row.status}: {row.changes[0]}{more}"
