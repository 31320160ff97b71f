"""Tables with any text in them, for properties of what is made from rows."""

from __future__ import annotations

from hypothesis import strategies as st

from patchlab.render.rows import Column, Row, Table

COLUMNS = (Column("Module", mono=True), Column("Class", mono=True), Column("Parameters", "right"))


@st.composite
def depth_lists(draw):
    depths = [0]
    for _ in range(draw(st.integers(0, 8))):
        depths.append(draw(st.integers(1, depths[-1] + 1)))
    return depths


@st.composite
def tables(draw):
    """Draw a table of a tree with any text in it."""
    rows = tuple(
        Row(
            depth,
            draw(st.text(max_size=12)),
            (draw(st.text(max_size=12)), str(draw(st.integers(0, 999)))),
            draw(st.sampled_from(["plain", "match", "error", "struck", "dim", "ok", "warning"])),
            draw(st.sampled_from([1, 12])),
            draw(st.sampled_from(["", "●"])),
            draw(st.sampled_from(["", "replaced"])),
            draw(st.text(max_size=12)),
        )
        for depth in draw(depth_lists())
    )
    return Table(COLUMNS, rows, draw(st.text(max_size=12)), note_title="Note")
