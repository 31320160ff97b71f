"""Closing: a widget that is closed lets go of all that was made for it.

ipywidgets keeps every open widget alive, and a layout and a style are widgets of their own, which
closing their widget leaves open. A notebook that runs all day would keep each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ipywidgets import Widget

__all__ = ["close_all", "close_looks"]


def close_all(shown: Iterable[Widget]) -> None:
    """Close widgets with what is in them."""
    for widget in shown:
        close_all(getattr(widget, "children", ()))
        close_looks(widget)
        widget.close()


def close_looks(widget: Widget) -> None:
    """Close a widget's layout and style."""
    for name in ("layout", "style"):
        if isinstance(part := getattr(widget, name, None), Widget):
            part.close()
