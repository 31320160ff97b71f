"""Payloads: what is written is what is read, in few bytes, and the same every time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchlab.render.payload import (
    MARK_STATES,
    STATUSES,
    UNINITIALIZED,
    TreeColumns,
    pack_marks,
    pack_tree,
    unpack_marks,
    unpack_tree,
)

TEXT = st.text(max_size=8)


@st.composite
def trees(draw, max_size=30):
    depths = [0]
    for _ in range(draw(st.integers(0, max_size - 1))):
        depths.append(draw(st.integers(1, depths[-1] + 1)))
    rows = len(depths)
    classes = draw(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))

    def column(values):
        return draw(st.lists(values, min_size=rows, max_size=rows))

    kinds = st.integers(-1, len(classes) - 1)
    counts = st.integers(UNINITIALIZED, 2**53)
    is_diff = draw(st.booleans())
    return TreeColumns(
        names=column(TEXT),
        depths=depths,
        shapes=column(st.integers(0, 2**20)),
        classes=classes,
        before=column(kinds),
        params_before=column(counts),
        after=column(kinds) if is_diff else None,
        params_after=column(counts) if is_diff else None,
        statuses=column(st.sampled_from(STATUSES)) if is_diff else None,
        shared=draw(st.dictionaries(st.integers(0, rows - 1), st.integers(0, rows - 1))),
        tied=draw(st.dictionaries(st.integers(0, rows - 1), st.integers(0, rows - 1))),
    )


def small_tree(**changes):
    fields = {
        "names": ["", "a", "a"],
        "depths": [0, 1, 1],
        "shapes": [0, 1, 1],
        "classes": [("Linear", "torch.nn")],
        "before": [0, 0, 0],
        "params_before": [4, 2, 2],
    }
    return TreeColumns(**(fields | changes))


@given(trees())
def test_any_tree_is_read_as_it_was_written(tree):
    header, columns = unpack_tree(pack_tree(tree))

    assert [header["names"][name] for name in columns["name"]] == list(tree.names)
    assert [tuple(pair) for pair in header["classes"]] == list(tree.classes)
    assert columns["depth"] == list(tree.depths)
    assert [kind - 1 for kind in columns["before"]] == list(tree.before)
    numbers = header["numbers"]
    assert [numbers[place] for place in columns["params_before"]] == list(tree.params_before)
    assert header["diff"] == (tree.after is not None)
    if tree.after is not None:
        assert [kind - 1 for kind in columns["after"]] == list(tree.after)
        assert [numbers[place] for place in columns["params_after"]] == list(tree.params_after)
        assert [STATUSES[code] for code in columns["status"]] == list(tree.statuses)
    for title, wanted in (("shared", tree.shared), ("tied", tree.tied)):
        places = columns.get(title, [])
        assert {row: first - 1 for row, first in enumerate(places) if first} == dict(wanted)
        assert (title in columns) == bool(wanted)


@given(trees())
def test_shapes_are_told_apart_as_before(tree):
    shapes = unpack_tree(pack_tree(tree))[1]["shape"]

    pairs = set(zip(shapes, tree.shapes, strict=True))
    assert len(pairs) == len(set(shapes)) == len(set(tree.shapes))


@given(trees())
def test_columns_start_at_multiples_of_eight_behind_the_header(tree):
    payload = pack_tree(tree)
    header, _ = unpack_tree(payload)

    end = 8 + int.from_bytes(payload[4:8], "little")
    starts = [start for _, start in header["columns"].values()]
    assert all(start % 8 == 0 and start >= end for start in starts)
    assert len(set(starts)) == len(starts)
    assert len(payload) % 8 == 0


def test_same_tree_gives_same_bytes():
    assert pack_tree(small_tree()) == pack_tree(small_tree())
    assert pack_tree(small_tree()) != pack_tree(small_tree(names=["", "a", "b"]))


def test_names_stay_as_they_are_and_cannot_end_the_header():
    odd = ['</script><img src=x onerror="alert(1)">', "层", '\\"]}\x00']

    header, columns = unpack_tree(pack_tree(small_tree(names=odd)))

    assert [header["names"][name] for name in columns["name"]] == odd


def test_fifty_thousand_rows_take_nine_bytes_each():
    rows = 50_000
    tree = TreeColumns(
        names=["", *(str(row % 500) for row in range(1, rows))],
        depths=[0, *([1] * (rows - 1))],
        shapes=[row % 300 for row in range(rows)],
        classes=[("Linear", "torch.nn")],
        before=[0] * rows,
        params_before=[row % 400 for row in range(rows)],
    )

    assert len(pack_tree(tree)) < 9 * rows


@pytest.mark.parametrize("column", ["depths", "before", "params_before", "shapes"])
def test_column_of_another_length_is_refused(column):
    with pytest.raises(ValueError, match="2 entries for 3 rows"):
        pack_tree(small_tree(**{column: [0, 0]}))


def test_other_bytes_are_no_payload():
    with pytest.raises(ValueError, match="PLT1"):
        unpack_tree(json.dumps({}).encode())


@given(st.lists(st.sampled_from(MARK_STATES), max_size=60))
def test_any_marks_are_read_as_they_were_written(states):
    packed = pack_marks(dict(enumerate(states)), len(states))

    assert unpack_marks(packed, len(states)) == states


def test_marks_cost_what_is_marked_and_not_what_is_there():
    assert pack_marks({}, 50_000) == b""
    assert len(pack_marks({7: "exact", 40_000: "container"}, 50_000)) == 5 * 4


@pytest.mark.parametrize(
    ("marks", "problem"), [({3: "exact"}, "row 3"), ({-1: "exact"}, "row -1"), ({0: "x"}, "'x'")]
)
def test_mark_that_does_not_fit_is_refused(marks, problem):
    with pytest.raises(ValueError, match=problem):
        pack_marks(marks, 3)
