"""Pieces: the statements of a patch file, and the order in which they can stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """One statement of the file.

    Attributes:
        now: The names of other pieces that it needs when it runs.
        later: Those that it needs when what it defines is called.
    """

    name: str
    kind: Literal["constant", "class", "function"]
    text: str
    now: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


def ordered_pieces(pieces: Mapping[str, Piece]) -> list[Piece]:
    """Return pieces so that each comes after what it needs when it runs, plain constants first.

    A decorator runs while another piece is defined, and by then needs all that it uses itself.
    """
    before = {name: frozenset(_reach(name, pieces, later=False)) for name in pieces}
    placed: dict[str, Piece] = {}

    def place(name: str, waiting: frozenset[str]) -> None:
        if name in placed or name in waiting or name not in pieces:
            return
        waiting |= {name}
        for needed in pieces[name].now:
            for deep in _reach(needed, pieces, later=True):
                # What needs a piece that waits here comes after it, whoever would like it before.
                if not before.get(deep, frozenset()) & waiting:
                    place(deep, waiting)
            place(needed, waiting)
        placed[name] = pieces[name]

    for piece in pieces.values():
        if piece.kind == "constant" and not piece.now:
            place(piece.name, frozenset())
    for name in pieces:
        for deep in _reach(name, pieces, later=True):
            place(deep, frozenset())
        place(name, frozenset())
    return list(placed.values())


def _reach(name: str, pieces: Mapping[str, Piece], *, later: bool) -> list[str]:
    """Every piece that one needs when it runs, or also later, at any depth, the nearest last."""
    seen: dict[str, None] = {}
    waiting = [name]
    while waiting:
        piece = pieces.get(waiting.pop())
        if piece is None:
            continue
        for needed in (*piece.now, *(piece.later if later else ())):
            if needed not in seen and needed != name:
                seen[needed] = None
                waiting.append(needed)
    return list(reversed(seen))
