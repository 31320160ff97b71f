"""Folding: equal siblings of a tree become one row, neighbors or not.

Nodes are equal by what the caller's keys say (class identity, tensors, marks) and by their children
all the way down, never by text. So twelve equal layers are one row even if two kinds of layers
alternate, and a layer whose attention is marked does not vanish among those whose is not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fold:
    """A row of a folded tree.

    Attributes:
        index: The first of the equal siblings; their children are shown for it alone.
        members: All of the equal siblings, in order.
        depth: 0 for the root.
        label: The names of the members: "layers", "0–11", "q_proj, v_proj".
    """

    index: int
    members: tuple[int, ...]
    depth: int
    label: str


@dataclass(frozen=True, slots=True)
class Folding:
    """A folded tree.

    Attributes:
        rows: The rows in order.
        shapes: A number for each node; two are equal, all the way down, if they have one number.
    """

    rows: tuple[Fold, ...]
    shapes: tuple[int, ...]


def fold(parents: Sequence[int], names: Sequence[str], keys: Sequence[Hashable]) -> Folding:
    """Fold a tree given as columns in preorder, in time linear in the number of nodes.

    Args:
        parents: The parent of each node, -1 for the root.
        names: The name of each node among its siblings.
        keys: What each node is, without its name and children.
    """
    shapes, children = _shapes(parents, names, keys)
    rows: list[Fold] = []
    stack: list[tuple[tuple[int, ...], int]] = [((0,), 0)] if shapes else []
    while stack:
        members, depth = stack.pop()
        first = members[0]
        rows.append(Fold(first, members, depth, join_names([names[node] for node in members])))
        groups: dict[int, list[int]] = {}
        for node in reversed(children[first]):
            groups.setdefault(shapes[node], []).append(node)
        stack.extend((tuple(group), depth + 1) for group in reversed(groups.values()))
    return Folding(tuple(rows), tuple(shapes))


def _shapes(
    parents: Sequence[int], names: Sequence[str], keys: Sequence[Hashable]
) -> tuple[list[int], list[list[int]]]:
    """Return the number of each node, and its children from the last to the first."""
    count = len(parents)
    shapes: list[int] = [0] * count
    # For each node with children: their names and shapes in turn, last child first.
    below: list[list[str | int] | None] = [None] * count
    children: list[list[int]] = [[]] * count
    known: dict[Hashable, int] = {}
    for node in range(count - 1, -1, -1):
        inner = below[node]
        key = keys[node] if inner is None else (keys[node], *inner)
        shape = shapes[node] = known.setdefault(key, len(known))
        parent = parents[node]
        if parent < 0:
            continue
        siblings = below[parent]
        if siblings is None:
            below[parent] = [names[node], shape]
            children[parent] = [node]
        else:
            siblings += (names[node], shape)
            children[parent].append(node)
    return shapes, children


def join_names(names: Sequence[str], *, parts: int = 3) -> str:
    """Write several names as one label: runs of numbers as ranges, then at most `parts` of them.

    Example:
        >>> join_names(["0", "1", "2", "5"]), join_names(["q", "k", "v", "o"])
        ('0–2, 5', 'q, k … o')
        >>> join_names([str(n) for n in range(0, 24, 2)])
        '0, 2 … 22'
    """
    if len(names) == 1:
        return names[0]
    runs: list[list[str]] = []
    for name in names:
        run = runs[-1] if runs else None
        if run is not None and _follows(name, run[-1]):
            run[1:] = [name]
        else:
            runs.append([name])
    labels = [run[0] if len(run) == 1 else f"{run[0]}–{run[1]}" for run in runs]
    if len(labels) > parts:
        return f"{', '.join(labels[: parts - 1])} … {labels[-1]}"
    return ", ".join(labels)


def _follows(name: str, before: str) -> bool:
    # Python refuses to read numbers of thousands of digits.
    if max(len(name), len(before)) > 18:
        return False
    return name.isdecimal() and before.isdecimal() and int(name) == int(before) + 1
