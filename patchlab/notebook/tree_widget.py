"""The tree widget: a model, or a model before and after, to look at in a notebook.

Python decides and the browser draws. The tree goes over once, as columns in `payload`; what a key
would match goes as small codes in `highlight` while the key is typed; details of a module go when
it is selected. `selected`, `query` and the switches are synced: setting them here moves the view,
and what is chosen there is read here. An error in the browser comes back and is kept in `errors`.

Beside the view every widget carries text and static HTML, for readers without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from torch import nn

from patchlab.errors import TargetError
from patchlab.model.diff import TreeDiff, diff_trees
from patchlab.model.tree import ModuleTree, module_tree
from patchlab.notebook.closing import close_looks
from patchlab.notebook.tree_subjects import DiffSubject, Subject, TreeSubject
from patchlab.plan.explain import more_about
from patchlab.plan.findings import Finding, ordered
from patchlab.render.html import table_html
from patchlab.render.numbers import count
from patchlab.render.payload import MarkState, TreeColumns, pack_marks, pack_tree
from patchlab.render.rows import Mark, Table
from patchlab.render.text import printable, table_text

__all__ = ["TreeWidget"]

_STATIC = Path(__file__).parent / "static"
_TWIN_ROWS = 200  # About 200 kB of HTML; folded, real models have far fewer rows.
_MOST_ERRORS = 100
_LOOKS: dict[str, Mark] = {
    "exact": Mark("match", "◆", "exact match"),
    "pattern": Mark("match", "◇", "pattern match"),
    "container": Mark("error", "✕", "container"),
    "swallowed": Mark("struck", "⊘", "swallowed"),
    "shadowed": Mark("dim", "○", "shadowed"),
}


class TreeWidget(anywidget.AnyWidget):
    """A view of one model, or of a model before and after.

    Attributes:
        selected: FQN of the selected module ("" is the root), None for none.
        query: What is in the search box.
        regex: Whether the query is a regular expression (JavaScript's, which differs from Python's
            in rare corners; keys are never matched there).
        tab: "before", "after" or "diff"; one tree alone has no tabs.
        changes_only: Whether only what differs is shown, with what holds it.
        fold_equal: Whether equal siblings are one row.
        error: A message that is shown in the view until it is set to "".
        errors: What went wrong in the browser, oldest first; not synced.
    """

    # Text and not paths: anywidget lets a file's contents, which the class holds, hold each widget.
    _esm = (_STATIC / "tree.js").read_text(encoding="utf-8")
    _css = (_STATIC / "tree.css").read_text(encoding="utf-8")

    payload = traitlets.Bytes(b"").tag(sync=True)
    highlight = traitlets.Bytes(b"").tag(sync=True)
    selected = traitlets.Unicode(None, allow_none=True).tag(sync=True)
    query = traitlets.Unicode("").tag(sync=True)
    regex = traitlets.Bool(False).tag(sync=True)
    tab = traitlets.Enum(["before", "after", "diff"], "diff").tag(sync=True)
    changes_only = traitlets.Bool(False).tag(sync=True)
    fold_equal = traitlets.Bool(True).tag(sync=True)
    details = traitlets.Dict().tag(sync=True)
    verdict = traitlets.Dict().tag(sync=True)
    findings: Any = traitlets.List().tag(sync=True)
    error = traitlets.Unicode("").tag(sync=True)
    errors = traitlets.Tuple()

    def __init__(
        self,
        tree: ModuleTree | nn.Module | None = None,
        *,
        after: ModuleTree | nn.Module | None = None,
        diff: TreeDiff | None = None,
        marks: Mapping[str, MarkState] | None = None,
        findings: Iterable[Finding] = (),
        verdict: str = "",
        **traits: Any,
    ) -> None:
        """Make the widget; the arguments are those of `show`, and `traits` initial traits."""
        super().__init__(**traits)
        self._on_suggestion: list[Callable[[str], object]] = []
        self.on_msg(self._receive)
        self.observe(self._answer, "selected")
        self.show(tree, after=after, diff=diff, marks=marks, findings=findings, verdict=verdict)

    def show(
        self,
        tree: ModuleTree | nn.Module | None = None,
        *,
        after: ModuleTree | nn.Module | None = None,
        diff: TreeDiff | None = None,
        marks: Mapping[str, MarkState] | None = None,
        findings: Iterable[Finding] = (),
        verdict: str = "",
    ) -> None:
        """Show another tree in the same widget; views that are open follow.

        Args:
            tree: The model or its tree; the one before if `after` is given.
            after: The model after, compared with `tree`.
            diff: A comparison, in place of `tree` and `after`.
            marks: As for `set_highlight`.
            findings: Shown under the verdict, each with its suggestion.
            verdict: One line on top, `**words**` in bold; by default what the tree is of.

        Raises:
            TargetError: Nothing to show, both a tree and a comparison, or marks for other modules.
        """
        # All that can fail comes first, so that a refusal leaves the widget as it was.
        subject = _subject(tree, after, diff)
        columns = subject.columns()
        payload, fqns, told = pack_tree(columns), subject.fqns, ordered(findings)
        # Backwards, so that of two equal FQNs (a name with a dot in it) the first one wins.
        row_of = {fqn: row for row, fqn in reversed(list(enumerate(fqns)))}
        codes = _codes(marks or {}, row_of, len(fqns))
        self._subject, self._fqns, self._row_of, self._findings = subject, fqns, row_of, told
        self._class_rows = _first_rows(columns)
        self._marks = dict(marks or {})
        self._reasons: dict[str, str] = {}
        with self.hold_sync():
            self.highlight, self.payload = codes, payload
            self.findings = [self._finding(item) for item in self._findings]
            self.verdict = _verdict(self._findings, verdict, self._subject.caption)
            if self.selected is not None and self.selected not in self._row_of:
                self.selected = None
            self._answer()

    def set_highlight(
        self, marks: Mapping[str, MarkState] | None, *, reasons: Mapping[str, str] | None = None
    ) -> None:
        """Show what a key matches, in place of what was shown before.

        Args:
            marks: FQN to "exact", "pattern", "container", "swallowed" or "shadowed"; None or empty
                for no highlight.
            reasons: FQN to a sentence on the rule that decides it, for the details pane.

        Raises:
            TargetError: An FQN is not in the tree.
        """
        self.highlight = _codes(marks or {}, self._row_of, len(self._fqns))
        self._marks = dict(marks or {})
        self._reasons = dict(reasons or {})
        self._answer()

    def known(self, marks: Mapping[str, MarkState]) -> dict[str, MarkState]:
        """Return the marks whose modules are in the tree; a difference looks through wrappers."""
        return {fqn: state for fqn, state in marks.items() if fqn in self._row_of}

    def on_suggestion(self, callback: Callable[[str], object]) -> None:
        """Call back with the key when a finding's suggestion is clicked."""
        self._on_suggestion.append(callback)

    def suggest(self, key: str) -> None:
        """Do what a click on a suggestion does; errors of the callbacks propagate."""
        for callback in self._on_suggestion:
            callback(key)

    def close(self) -> None:
        """Close the widget with its layout."""
        close_looks(self)
        super().close()

    def to_text(self) -> str:
        """Return the static twin as text."""
        return table_text(self._table())

    def to_html(self) -> str:
        """Return the static twin as HTML."""
        return table_html(self._table())

    def _repr_mimebundle_(self, **options: Any) -> Any:
        shown = super()._repr_mimebundle_(**options)
        if shown is None:
            return None
        bundle, metadata = shown if isinstance(shown, tuple) else (shown, {})
        table = self._table()
        twin = {"text/plain": table_text(table), "text/html": table_html(table)}
        return {**bundle, **twin}, metadata

    def __repr__(self) -> str:
        # ipywidgets would write out every trait, the payload among them.
        return f"<TreeWidget: {self.verdict.get('text', '').replace('**', '')}>"

    def _answer(self, _change: Any = None) -> None:
        """Send the details of the selected module."""
        fqn = self.selected
        row = None if fqn is None else self._row_of.get(fqn)
        if fqn is None or row is None:
            self.details = {}
            return
        details = self._subject.details(row)
        names = {fqn, *details.class_names}
        self.details = {
            "fqn": fqn,
            "sides": list(details.sides),
            "rule": self._reasons.get(fqn, ""),
            "notes": list(details.notes),
            "findings": [self._finding(item) for item in self._findings if item.subject in names],
        }

    def _finding(self, finding: Finding) -> dict[str, Any]:
        row = self._row_of.get(finding.subject) if finding.subject else None
        if row is None:
            row = self._class_rows.get(finding.subject)
        return {
            "code": finding.code,
            "severity": finding.severity,
            "title": finding.title,
            "message": printable(finding.message),
            "suggestion": finding.suggestion,
            "more": more_about(finding),
            "fqn": None if row is None else self._fqns[row],
        }

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "error":
            message = str(content.get("message", "unknown error"))
            self.errors = (*self.errors, message)[-_MOST_ERRORS:]
        elif kind == "suggestion":
            self.error = ""
            try:
                self.suggest(str(content.get("key", "")))
            except Exception as error:  # noqa: BLE001 - a callback may raise anything; it is shown
                self.error = f"{type(error).__name__}: {error}"

    def _table(self) -> Table:
        """Return the static twin, short enough to be kept in a notebook."""
        marks = {fqn: _LOOKS[state] for fqn, state in self._marks.items() if state in _LOOKS}
        table = self._subject.table(marks)
        hidden = len(table.rows) - _TWIN_ROWS
        if hidden <= 0:
            return table
        more = f"… and {count(hidden, 'more row')}; run the cell to see them."
        return replace(table, rows=table.rows[:_TWIN_ROWS], footer=(*table.footer, more))


def _subject(
    tree: ModuleTree | nn.Module | None, after: ModuleTree | nn.Module | None, diff: TreeDiff | None
) -> Subject:
    if diff is not None:
        if tree is not None or after is not None:
            raise TargetError("give either a tree (and after) or a diff to TreeWidget, not both.")
        return DiffSubject(diff)
    if tree is None:
        raise TargetError(
            "nothing to show: give TreeWidget a model, a ModuleTree, or a TreeDiff as diff."
        )
    if after is not None:
        return DiffSubject(diff_trees(tree, after))
    return TreeSubject(tree if isinstance(tree, ModuleTree) else module_tree(tree))


def _codes(marks: Mapping[str, MarkState], row_of: Mapping[str, int], rows: int) -> bytes:
    unknown = next((fqn for fqn in marks if fqn not in row_of), None)
    if unknown is not None:
        raise TargetError(f"no module {unknown!r} in the tree that this widget shows.")
    return pack_marks({row_of[fqn]: state for fqn, state in marks.items()}, rows)


def _first_rows(columns: TreeColumns) -> dict[str, int]:
    """Return the first row of each class label."""
    rows: dict[str, int] = {}
    for kinds in (columns.before, columns.after or ()):
        for row, kind in enumerate(kinds):
            if kind >= 0:
                rows.setdefault(columns.classes[kind][0], row)
    return rows


def _verdict(findings: tuple[Finding, ...], verdict: str, caption: str) -> dict[str, str]:
    """Return the pill and the line on top."""
    tone, pill = ("ok", "ok") if verdict or findings else ("", "")
    for severity in ("warning", "error"):
        number = sum(finding.severity == severity for finding in findings)
        if number:
            tone, pill = severity, count(number, severity)
    head, dot, rest = caption.partition(" · ")
    return {"tone": tone, "pill": pill, "text": printable(verdict or f"**{head}**{dot}{rest}")}
