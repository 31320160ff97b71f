"""Payloads: a module tree as one run of bytes for the browser.

A tree of fifty thousand modules is sent at once, so it goes as columns of small integers that point
into tables of strings, and not as objects. The layout, all numbers little-endian:

* 4 bytes `PLT1`, 4 bytes length of the header, the header in JSON (UTF-8), padding to 8 bytes,
* the columns, each padded to 8 bytes.

The header has `rows`, the tables `names`, `classes` (label, Python module) and `numbers`, `diff`,
and `columns`: title to `[type, offset]` with `u1`, `u2` or `u4` as type. Rows are in preorder, so
depths are enough to tell the tree. `frontend/src/payload.js` reads all this and checks every index.

Marks (what a key that is being typed would match) change with each letter and go on their own, as
runs of equal codes: 32-bit numbers of `count * 8 + code`.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args

MarkState = Literal["none", "exact", "pattern", "container", "swallowed", "shadowed"]
MARK_STATES: tuple[MarkState, ...] = get_args(MarkState)
STATUSES = ("same", "added", "removed", "replaced", "changed")
UNINITIALIZED = -1

_MAGIC = b"PLT1"
_TYPES = {"u1": "B", "u2": "H", "u4": "I"}


@dataclass(frozen=True, slots=True)
class TreeColumns:
    """A tree of modules, or two of them put one upon the other, with an entry for each row.

    Attributes:
        names: The last part of each FQN.
        depths: 0 for the root, which comes first; rows are in preorder.
        shapes: Equal for siblings that are equal in everything but the name, all the way down.
        classes: The table of classes: label and Python module.
        before: Place in `classes`, -1 where the module is not in the tree before.
        params_before: Parameters at and below; `UNINITIALIZED` if not known yet.
        after: As `before`, for the tree after; None if there is one tree only.
        params_after: As `params_before`; None if there is one tree only.
        statuses: Words from `STATUSES`; None if there is one tree only.
        shared: Row to the row where the same module comes first.
        tied: Row to the row of the module that has one of its parameters first.
    """

    names: Sequence[str]
    depths: Sequence[int]
    shapes: Sequence[int]
    classes: Sequence[tuple[str, str]]
    before: Sequence[int]
    params_before: Sequence[int]
    after: Sequence[int] | None = None
    params_after: Sequence[int] | None = None
    statuses: Sequence[str] | None = None
    shared: Mapping[int, int] = field(default_factory=dict)
    tied: Mapping[int, int] = field(default_factory=dict)


def pack_tree(tree: TreeColumns) -> bytes:
    """Write a tree as bytes; the same tree gives the same bytes.

    Raises:
        ValueError: A column has another length than the others.
    """
    names, name_column = _table(tree.names)
    numbers, params_before = _table(tree.params_before)
    columns: dict[str, Any] = {
        "depth": tree.depths,
        "name": name_column,
        "shape": _table(tree.shapes)[1],
        "before": [kind + 1 for kind in tree.before],
    }
    if tree.after is not None and tree.params_after is not None:
        numbers, both = _table([*tree.params_before, *tree.params_after])
        params_before = both[: len(tree.params_before)]
        columns["after"] = [kind + 1 for kind in tree.after]
        columns["params_after"] = both[len(tree.params_before) :]
    columns["params_before"] = params_before
    if tree.statuses is not None:
        code = {status: index for index, status in enumerate(STATUSES)}
        columns["status"] = [code[status] for status in tree.statuses]
    for title, places in (("shared", tree.shared), ("tied", tree.tied)):
        if places:
            columns[title] = [0] * len(tree.names)
            for row, first in places.items():
                columns[title][row] = first + 1
    return _pack(
        {
            "rows": len(tree.names),
            "diff": tree.after is not None,
            "names": names,
            "classes": [list(pair) for pair in tree.classes],
            "numbers": numbers,
        },
        columns,
    )


def unpack_tree(payload: bytes) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Read a payload back: its header, and its columns as they were written.

    Raises:
        ValueError: It is no payload.
    """
    if payload[:4] != _MAGIC:
        raise ValueError("this is no tree payload: it does not begin with PLT1.")
    end = 8 + int.from_bytes(payload[4:8], "little")
    header = json.loads(payload[8:end])
    columns = {}
    for title, (kind, start) in header["columns"].items():
        values = array(_TYPES[kind])
        values.frombytes(payload[start : start + values.itemsize * header["rows"]])
        columns[title] = _little_endian(values).tolist()
    return header, columns


def pack_marks(marks: Mapping[int, MarkState], rows: int) -> bytes:
    """Write the state of each row as runs.

    Args:
        marks: Row to state; rows that are left out have none.
        rows: The number of rows of the tree.

    Returns:
        b"" if no row is marked.

    Raises:
        ValueError: A row is not in the tree, or a state is unknown.
    """
    codes = bytearray(rows)
    for row, state in marks.items():
        if not 0 <= row < rows:
            raise ValueError(f"row {row} is not in the tree, which has {rows} rows.")
        if state not in MARK_STATES:
            raise ValueError(f"mark {state!r} is none of {', '.join(MARK_STATES)}.")
        codes[row] = MARK_STATES.index(state)
    if not any(codes):
        return b""
    runs = array("I", [len(list(run)) * 8 + code for code, run in groupby(codes)])
    return _little_endian(runs).tobytes()


def unpack_marks(packed: bytes, rows: int) -> list[MarkState]:
    """Read marks back, one for each row."""
    runs = array("I")
    runs.frombytes(packed)
    states: list[MarkState] = []
    for run in _little_endian(runs):
        states += [MARK_STATES[run & 7]] * (run >> 3)
    return states or ["none"] * rows


def _table(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Return the different values in order of appearance, and each value's place among them."""
    places: dict[Any, int] = {}
    column = [places.setdefault(value, len(places)) for value in values]
    return list(places), column


def _pack(header: dict[str, Any], columns: Mapping[str, Sequence[int]]) -> bytes:
    arrays = {title: _small(title, values, header["rows"]) for title, values in columns.items()}
    # Offsets are part of the header, whose length they depend on. They are counted from its end
    # and given room for the largest there can be, so that it need not be written twice.
    sizes = {title: _padded(len(values.tobytes())) for title, values in arrays.items()}
    placeholder = {title: [_kind(values), 10**10] for title, values in arrays.items()}
    room = len(_json({**header, "columns": placeholder}))
    start = _padded(8 + room)
    places = {}
    for title, values in arrays.items():
        places[title] = [_kind(values), start]
        start += sizes[title]
    text = _json({**header, "columns": places}).ljust(room)
    parts = [_MAGIC, room.to_bytes(4, "little"), text]
    parts.append(bytes(_padded(8 + room) - 8 - room))
    for title, values in arrays.items():
        data = _little_endian(values).tobytes()
        parts += [data, bytes(sizes[title] - len(data))]
    return b"".join(parts)


def _small(title: str, values: Sequence[int], rows: int) -> array[int]:
    if len(values) != rows:
        raise ValueError(f"column {title} has {len(values)} entries for {rows} rows.")
    largest = max(values, default=0)
    return array("B" if largest < 1 << 8 else "H" if largest < 1 << 16 else "I", values)


def _kind(values: array[int]) -> str:
    return f"u{values.itemsize}"


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
