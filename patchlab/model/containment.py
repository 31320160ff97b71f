"""Which class can hold which, at any depth: the catalog's containment edges, closed.

Sets of classes are bit sets (plain ints, one bit for each class of the catalog), so that the
closure of 7,600 classes takes some 30 ms and "does this hold any of those" is one `&`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Edges = Sequence[Sequence[Sequence[Any]]]


def as_mask(numbers: Iterable[int]) -> int:
    """Return the bit set of some class numbers."""
    listed = list(numbers)
    cells = bytearray(max(listed) // 8 + 1) if listed else bytearray()
    for number in listed:
        cells[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(cells, "little")


def numbers_in(mask: int) -> Iterator[int]:
    """Yield the class numbers of a bit set, in ascending order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class Containment:
    """The closure of the edges; made once, on first use.

    Args:
        edges: For each class its attributes, each with the numbers of the classes that it can
            hold: `["layer", 12, 40]`. As in the cached file, since to make 20,000 tuples of them
            takes longer than the closure.
    """

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._closures: list[int] | None = None

    def closure(self, number: int) -> int:
        """Return the classes that a class can hold at any depth; itself only if it recurs."""
        if self._closures is None:
            self._closures = self._close()
        return self._closures[number]

    def reachable(self, numbers: Iterable[int]) -> int:
        """Return what any of the classes can hold at any depth, without the classes themselves."""
        found = 0
        for number in numbers:
            found |= self.closure(number)
        return found

    def inner(self, number: int, matched: int) -> tuple[int, ...]:
        """Return the classes of `matched` that a class can hold, itself left out."""
        return tuple(numbers_in(self.closure(number) & matched & ~(1 << number)))

    def path_to(self, number: int, matched: int) -> tuple[str, int]:
        """Return the shortest path of attributes to a class of `matched`, and that class.

        The path is empty and the class -1 if the class can hold none.
        """
        seen = {number}
        waiting: deque[tuple[str, int]] = deque([("", number)])
        while waiting:
            path, holder = waiting.popleft()
            for attribute, *children in self._edges[holder]:
                longer = f"{path}.{attribute}" if path else attribute
                for child in children:
                    if child in seen:
                        continue
                    if matched >> child & 1:
                        return longer, child
                    seen.add(child)
                    waiting.append((longer, child))
        return "", -1

    def _close(self) -> list[int]:
        direct = [
            as_mask(child for _, *children in edges for child in children) for edges in self._edges
        ]
        children = [tuple(numbers_in(mask)) for mask in direct]
        closures = direct
        order = self._postorder(children)
        changed = True
        while changed:  # twice, unless classes hold each other in a circle
            changed = False
            for number in order:
                mask = closures[number]
                for child in children[number]:
                    mask |= closures[child]
                if mask != closures[number]:
                    closures[number] = mask
                    changed = True
        return closures

    @staticmethod
    def _postorder(children: Sequence[tuple[int, ...]]) -> list[int]:
        order: list[int] = []
        seen = bytearray(len(children))
        for start in range(len(children)):
            stack = [start]
            while stack:
                number = stack[-1]
                if seen[number] == 0:
                    seen[number] = 1
                    stack.extend(child for child in children[number] if not seen[child])
                else:
                    stack.pop()
                    if seen[number] == 1:
                        seen[number] = 2
                        order.append(number)
        return order
