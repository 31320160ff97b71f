"""Static HTML: well formed, harmless whatever the names are, and of few kinds of tags."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given

from patchlab.render.html import table_html
from patchlab.render.rows import Row, Table
from patchlab.render.text import printable
from tests.toy_tables import COLUMNS, tables

TAGS = {"div", "table", "caption", "thead", "tbody", "tr", "th", "td", "span", "details", "summary"}
ATTRIBUTES = {"style", "title", "scope", "align"}


class Reader(HTMLParser):
    """Reads a fragment; fails on tags that are not closed in turn."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.titles = [], set(), set(), []
        self.cells, self.text = [], []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.titles += [value for name, value in attrs if name == "title"]
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open, f"closed and never opened: {tag}"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open:
            self.cells[-1] += data


@given(tables())
def test_only_known_tags_and_attributes_come_out(table):
    reader = Reader(table_html(table))

    assert reader.tags <= TAGS
    assert reader.attributes <= ATTRIBUTES


@given(tables())
def test_every_text_is_there_as_text(table):
    reader = Reader(table_html(table))
    width = len(table.columns) + any(row.note for row in table.rows)

    assert reader.titles == [printable(row.title) for row in table.rows if row.title]
    for place, row in enumerate(table.rows):
        cells = reader.cells[place * width : (place + 1) * width]
        assert printable(row.label) in cells[0]
        assert cells[1 : len(row.cells) + 1] == [printable(cell) for cell in row.cells]


@pytest.mark.parametrize(
    "name",
    [
        "<img src=x onerror=alert(1)>",
        '"><script>alert(1)</script>',
        "</td></tr></table>",
        "&lt;b&gt;",
        "' onmouseover='alert(1)",
    ],
)
def test_a_name_that_is_markup_is_shown_as_it_is(name):
    table = Table(
        COLUMNS, (Row(0, name, (name, "1"), title=name, note=name),), name, footer=(name,)
    )
    reader = Reader(table_html(table))

    assert reader.tags <= TAGS
    assert reader.cells[:2] == [name, name]
    assert reader.titles == [name]
    assert reader.text.count(name) == 5


def test_reader_can_say_no():
    """Guards the tests above, which would pass if the reader let everything through."""
    assert Reader("<div><img></img></div>").tags > {"div"}
    with pytest.raises(AssertionError):
        Reader("<div><span></div></span>")


def test_no_style_sheet_script_or_picture_is_needed():
    html = table_html(Table(COLUMNS, (Row(0, "a", ("B", "1"), "match", note="replaced"),)))

    for word in ("<style", "<script", "<svg", "class=", "http", "url(", "@media"):
        assert word not in html


def test_depth_is_in_the_text_and_not_only_in_the_style():
    html = table_html(Table(COLUMNS, (Row(0, "a", ("B", "1")), Row(3, "b", ("B", "1")))))

    assert Reader(html).cells[3] == "\xa0" * 6 + "b"


@pytest.mark.parametrize("tone", ["match", "ok", "warning", "error", "struck"])
def test_color_is_mixed_with_the_color_of_the_text_around(tone):
    html = table_html(Table(COLUMNS, (Row(0, "a", ("B", "1"), tone, note="said"),)))

    assert "currentColor" in html
    assert "color:#" not in html


def test_rows_beyond_the_first_can_be_opened_and_those_left_out_are_counted():
    table = Table(COLUMNS, tuple(Row(0, str(n), ("C", "1")) for n in range(1_500)))
    reader = Reader(table_html(table))

    assert reader.cells[::3] == [str(n) for n in range(1_000)]
    assert "800 more rows" in reader.text
    assert any("500 more rows" in text for text in reader.text)
    assert len(table_html(table)) < 700_000


def test_a_table_without_rows_is_its_caption():
    reader = Reader(table_html(Table(COLUMNS, (), "Nothing here")))

    assert reader.text == ["Nothing here"]
    assert "table" not in reader.tags
