"""`Shown`: how a value shows itself. It says what its table is; everything else follows.

A notebook shows the richest form that it knows: `_repr_mimebundle_` gives text and static HTML, and
asks `rich_views`, in order, for more. The notebook room puts its widgets there; this room knows
nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from patchlab.render.dot import graphviz_source, table_dot
from patchlab.render.frames import table_frame
from patchlab.render.html import MAX_HTML_ROWS, table_html
from patchlab.render.rows import Table
from patchlab.render.text import MAX_TEXT_ROWS, table_text

RichView = Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | None]

rich_views: list[RichView] = []
"""Each takes a value and its bundle (MIME type to content) and returns a bundle to show instead, or
None if it has no view for such a value. The first that has one is taken."""


class Shown:
    """A value that can show itself as text, HTML, DOT, a frame, and in a notebook.

    A subclass defines `to_table`; the options of the methods below are passed on to it.
    """

    def to_table(self, *args: Any, **options: Any) -> Table:
        """Return the rows in which the value is shown."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its rows are.")

    def to_text(self, *, width: int = 100, max_rows: int = MAX_TEXT_ROWS, **options: Any) -> str:
        """Return the value as text, `width` columns wide and `max_rows` rows long at most."""
        return table_text(self.to_table(**options), width=width, max_rows=max_rows)

    def to_html(self, *, max_rows: int = MAX_HTML_ROWS, **options: Any) -> str:
        """Return the value as static HTML that needs no script and no style sheet."""
        return table_html(self.to_table(**options), max_rows=max_rows)

    def to_dot(self, **options: Any) -> str:
        """Return the value as a graph in the DOT language."""
        return table_dot(self.to_table(**options))

    def to_graphviz(self, **options: Any) -> Any:
        """Return the graph as a `graphviz.Source`, which a notebook shows as a picture.

        Where no Graphviz is installed it shows the static HTML with a hint instead.
        """
        table = self.to_table(**options)
        return graphviz_source(table_dot(table), table_html(table))

    def to_frame(self) -> Any:
        """Return the rows as a pandas frame."""
        return table_frame(self.to_table())

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.to_table().caption}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.to_text(), "text/html": self.to_html()}
        for view in rich_views:
            richer = view(self, bundle)
            if richer is not None:
                return dict(richer)
        return bundle
