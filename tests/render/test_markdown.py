"""Pages as HTML: what is code stays code, and what is text stays text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from patchlab.render.markdown import markdown_html

PAGE = """# A page

One paragraph
of two lines with `code & more`.

## Below

```python
# not a heading

x = "<b>"  # `kept`
```

The end.
"""
OURS = {"div", "h3", "h4", "h5", "h6", "p", "pre", "code"}


class Reader(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def test_page_has_its_headings_paragraphs_and_code():
    read = Reader(markdown_html(PAGE))

    assert read.tags == ["div", "h3", "p", "code", "h4", "pre", "p"]
    assert "".join(read.text) == (
        "A pageOne paragraph of two lines with code & more.Below"
        '# not a heading\n\nx = "<b>"  # `kept`The end.'
    )


@given(st.text(alphabet="<>&\"'`#\n abc=", max_size=60))
def test_whatever_a_page_holds_no_tag_comes_from_it(text):
    assert set(Reader(markdown_html(f"# Title\n\n{text}\n")).tags) <= OURS


def test_same_page_gives_the_same_bytes():
    assert markdown_html(PAGE) == markdown_html(PAGE)
