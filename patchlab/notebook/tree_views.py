"""Trees, differences, previews and routing traces show widgets, while this is switched on.

The rooms below know nothing of widgets: a value gives text and HTML, and asks whoever has entered
himself in `render.shown.rich_views` for more. Text and HTML stay in the bundle beside the widget.
Switching on loads no widget library yet; the first value that is shown does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patchlab.render.numbers import count, human
from patchlab.render.shown import rich_views

if TYPE_CHECKING:
    from patchlab.notebook.routing_widget import RoutingWidget
    from patchlab.notebook.tree_widget import TreeWidget
    from patchlab.verify.preview import Preview

__all__ = ["hide_widgets", "preview_line", "show_widgets", "widget_for"]


def widget_for(value: Any) -> TreeWidget | RoutingWidget | None:
    """Make the widget that shows a value; None if there is none for its kind."""
    # Looked up and not imported: a value of the class is there only if its file is, and it has
    # all of torch behind it.
    trace = sys.modules.get("patchlab.routing.trace")
    if trace is not None and isinstance(value, trace.RoutingTrace):
        from patchlab.notebook.routing_widget import RoutingWidget

        return RoutingWidget(value)
    from patchlab.model.diff import TreeDiff
    from patchlab.model.tree import ModuleTree
    from patchlab.verify.preview import Preview

    if not isinstance(value, (ModuleTree, TreeDiff, Preview)):
        return None
    from patchlab.notebook.tree_widget import TreeWidget

    if isinstance(value, ModuleTree):
        return TreeWidget(value)
    if isinstance(value, TreeDiff):
        return TreeWidget(diff=value)
    return _preview_widget(value)


def show_widgets() -> None:
    """Let trees, differences, previews and traces show widgets; a second time does nothing."""
    if _view not in rich_views:
        rich_views.append(_view)


def hide_widgets() -> None:
    """Let them show text and HTML alone again."""
    if _view in rich_views:
        rich_views.remove(_view)


def preview_line(preview: Preview) -> str:
    """Say in a line what a preview replaces; what stands between asterisks is to be bold."""
    counts, before = preview.counts, preview.before
    used = sum(number > 0 for number in counts.values())
    return (
        f"**{count(sum(counts.values()), 'module')}** replaced by {count(used, 'rule')} in "
        f"**{before.root.class_name}** · {count(len(before), 'module')} · "
        f"{human(before.num_parameters)} parameters"
    )


def _preview_widget(preview: Preview) -> TreeWidget:
    from patchlab.notebook.tree_marks import preview_marks
    from patchlab.notebook.tree_widget import TreeWidget

    tree = preview.before if preview.diff is None else None
    widget = TreeWidget(
        tree, diff=preview.diff, findings=preview.findings, verdict=preview_line(preview)
    )
    found = preview_marks(preview)
    known = widget.known(found.marks)
    widget.set_highlight(known, reasons=found.reasons)
    return widget


def _view(value: Any, bundle: Mapping[str, Any]) -> Mapping[str, Any] | None:
    widget = widget_for(value)
    shown = None if widget is None else widget._repr_mimebundle_()
    # The value's own text and HTML say more than the widget's: a preview's have its findings.
    return None if shown is None else {**shown[0], **bundle}
