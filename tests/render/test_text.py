"""Text: aligned whatever the names are, and never changed by them."""

from __future__ import annotations

import doctest
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchlab.model.folding
import patchlab.render.numbers
import patchlab.render.text
from patchlab.render.numbers import count, human
from patchlab.render.rows import Row, Table
from patchlab.render.text import cut, guides, printable, table_text, text_width
from tests.toy_tables import COLUMNS, depth_lists, tables


@pytest.mark.parametrize(
    "module", [patchlab.render.numbers, patchlab.render.text, patchlab.model.folding]
)
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(module)

    assert result.attempted > 0
    assert result.failed == 0


@given(depth_lists())
def test_guides_say_how_deep_a_row_is_and_whether_it_is_the_last_child(depths):
    for place, guide in enumerate(guides(depths)):
        assert len(guide) == 3 * depths[place]
        later = [depth for depth in depths[place + 1 :] if depth <= depths[place]]
        has_next = bool(later) and later[0] == depths[place]
        assert guide.endswith("├─ " if has_next else "└─ " if depths[place] else "")


@given(tables())
def test_each_row_is_one_line(table):
    lines = table_text(table).split("\n")

    assert len(lines) == len(table.rows) + 1 + bool(table.caption)
    assert all(line.isprintable() for line in lines)


@given(tables())
def test_the_same_rows_give_the_same_bytes(table):
    assert table_text(table) == table_text(table)
    table_text(table).encode("utf-8")


@given(tables(), st.integers(60, 120))
def test_no_line_is_wider_than_asked(table, width):
    for line in table_text(table, width=width).split("\n")[bool(table.caption) :]:
        assert text_width(line) <= width


@given(tables())
def test_columns_begin_at_the_same_place_in_every_row(table):
    """The class column, measured in columns of the screen and not in characters."""
    plain = Table(COLUMNS, tuple(Row(row.depth, row.label, ("Klass", "1")) for row in table.rows))
    lines = table_text(plain).split("\n")[1:]

    assert len({text_width(line[: line.rindex("Klass")]) for line in lines}) == 1


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("层", 2), ("é", 1), ("e\u0301", 1), ("├─ ● →", 6), ("한글", 4)]
)
def test_width_is_that_of_the_screen(text, width):
    assert text_width(text) == width


@given(st.text())
def test_the_short_way_to_measure_agrees_with_the_long_one(text):
    """`text_width` counts characters where none of them can be odd; it must know which."""
    text = printable(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    combining = sum(unicodedata.combining(char) > 0 for char in text)
    both = sum(
        unicodedata.combining(char) > 0 and unicodedata.east_asian_width(char) in "WF"
        for char in text
    )

    assert text_width(text) == len(text) + wide - combining - both


@given(st.text(), st.integers(1, 20))
def test_a_text_that_is_cut_fits_and_says_so(text, width):
    short = cut(text, width)

    assert text_width(short) <= max(width, 1)
    assert short == text or short.endswith("…")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("line\nbreak", "line\\nbreak"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
        ("层", "层"),
        ("a\\n", "a\\n"),
    ],
)
def test_characters_that_would_change_the_lines_around_are_written_out(name, shown):
    assert printable(name) == shown


def test_how_many_a_row_stands_for_is_not_cut_off():
    table = Table(COLUMNS, (Row(0, "a_very_long_name" * 5, ("Class", "1"), fold=58),))

    assert "… × 58" in table_text(table, width=60)


def test_numbers_are_never_cut():
    table = Table(COLUMNS, (Row(0, "name" * 20, ("Class" * 20, "123,456,789,012")),))

    assert "123,456,789,012" in table_text(table, width=40)


def test_rows_left_out_are_counted():
    table = Table(COLUMNS, tuple(Row(0, str(n), ("C", "1")) for n in range(12)))

    assert table_text(table, max_rows=10).endswith("… 2 more rows")
    assert "more rows" not in table_text(table, max_rows=12)


def test_a_table_without_rows_is_its_caption_and_footer():
    assert table_text(Table(COLUMNS, (), "Nothing here", footer=("so far",))) == (
        "Nothing here\nso far"
    )


@given(st.integers(0, 10**15))
def test_short_numbers_are_right_to_half_a_percent(number):
    digits, _, unit = human(number).replace(",", "").partition(" ")
    value = float(digits) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit]

    assert value == pytest.approx(number, rel=0.005)


@given(st.integers(0, 10**14))
def test_short_numbers_are_short(number):
    assert len(human(number)) <= 6


def test_counts_take_the_plural():
    assert [count(n, "class", "classes") for n in (0, 1, 2)] == [
        "0 classes",
        "1 class",
        "2 classes",
    ]
