"""Values that show themselves: every form from one table, and a seam for richer views."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from patchlab.render import shown
from patchlab.render.rows import Column, Row, Table
from patchlab.render.shown import Shown


@dataclass(frozen=True, repr=False)
class Value(Shown):
    names: tuple[str, ...]

    def to_table(self, *, loud=False):
        rows = tuple(
            Row(0, name.upper() if loud else name, (str(len(name)),)) for name in self.names
        )
        return Table((Column("Name"), Column("Length", "right")), rows, f"{len(rows)} names")


@pytest.fixture
def value():
    return Value(("attn", "mlp"))


def test_every_form_is_of_the_same_rows(value):
    assert str(value) == "2 names\nName  Length\nattn       4\nmlp        3"
    assert all(name in value.to_html() and name in value.to_dot() for name in value.names)
    assert list(value.to_frame()["Name"]) == ["attn", "mlp"]
    assert repr(value) == "<Value: 2 names>"


def test_options_reach_the_table(value):
    assert "ATTN" in value.to_text(loud=True)
    assert "ATTN" in value.to_html(loud=True)
    assert "ATTN" in value.to_dot(loud=True)
    with pytest.raises(TypeError, match="quiet"):
        value.to_text(quiet=True)


def test_a_notebook_gets_text_and_html(value):
    assert value._repr_mimebundle_() == {
        "text/plain": value.to_text(),
        "text/html": value.to_html(),
    }


def test_the_first_rich_view_that_takes_the_value_is_shown(value, monkeypatch):
    def none(value, bundle):
        return None

    def widget(value, bundle):
        return {**bundle, "application/x-view": value.names}

    monkeypatch.setattr(shown, "rich_views", [none, widget])

    assert value._repr_mimebundle_()["application/x-view"] == ("attn", "mlp")
    assert value._repr_mimebundle_()["text/plain"] == value.to_text()


def test_a_value_that_does_not_say_its_rows_is_told_so():
    with pytest.raises(NotImplementedError, match="Shown does not say what its rows are"):
        Shown().to_text()
