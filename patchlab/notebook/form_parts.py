"""What the form is made of: its fields, buttons and lines, and how they are filled.

This half of the form knows how things look and where they go, and nothing of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from patchlab.mapping.registry import RegisteredEntry
from patchlab.notebook.closing import close_all
from patchlab.notebook.copy_button import CopyButton
from patchlab.notebook.form_rows import entry_row, finding_cards
from patchlab.notebook.form_style import (
    busy_html,
    code_html,
    error_html,
    key_html,
    line_html,
    note_html,
    style_html,
)
from patchlab.plan.findings import Finding


class FormParts:
    """The widgets of a form.

    Args:
        on_copy: Called when the code is asked for.
        on_shown: Called when the form comes on a screen.
    """

    def __init__(self, on_copy: Callable[[], None], on_shown: Callable[[], None]) -> None:
        wide = {"description_width": "initial"}
        self.key = widgets.Text(
            description="Key: exact class name or pattern",
            placeholder="LlamaMLP or ^Llama(MLP|Attention)$",
            style=wide,
        )
        self.cls = widgets.Combobox(
            description="Replacement", placeholder="a class of this notebook", style=wide
        )
        self.overwrite = widgets.Checkbox(
            description="Overwrite a key that is registered", indent=False
        )
        self.register, self.clear = _button("Register", "first"), _button("Clear all", "link")
        self.undo, self.cancel = _button("Undo", "link"), _button("Cancel", "link")
        self.clear.tooltip = "patchlab.clear_patch_mapping()"
        self.copy = CopyButton(on_copy, on_shown)
        self.actions = stack([self.register, self.copy], "row")
        self._match_line, self._class_line = widgets.HTML(), widgets.HTML()
        self._message, self._code, self._busy = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._progress = stack([self._busy, self.cancel], "row")
        self._progress.layout.display = "none"
        self._findings, self._rows = stack([], "stack"), stack([], "entries")
        style = widgets.HTML(style_html())
        style.add_class("patchlab-hidden")
        self.all: Sequence[widgets.Widget] = (
            style,
            stack([self.key, self._match_line], "stack"),
            stack([self.cls, self._class_line], "stack"),
            self.overwrite,
            self.actions,
            self._message,
            self._code,
            self._progress,
            self._findings,
            self._rows,
            stack([self.clear, self.undo], "row"),
        )

    def show_key(self, key: str, problem: str, matches: str) -> None:
        """Show what a key matches, or why it can match nothing; and a long key as a whole."""
        said = line_html(problem, "error") or line_html(matches)
        self._match_line.value = key_html(key) + said
        (self.key.add_class if problem else self.key.remove_class)("patchlab-wrong")

    def show_class(self, problem: str, note: str) -> None:
        """Show what is known of the class, or why there is none."""
        self._class_line.value = line_html(problem, "warning") or line_html(note)

    @property
    def message(self) -> str:
        """The error or the note that is shown, as HTML."""
        return str(self._message.value)

    def show_error(self, text: str) -> None:
        """Show what went wrong, "" for nothing."""
        self._message.value = error_html(text)

    def show_note(self, text: str) -> None:
        """Show what was done, "" for nothing."""
        self._message.value = note_html(text)

    def show_code(self, code: str) -> None:
        """Show a line of Python, "" for none."""
        self._code.value = code_html(code)

    def show_progress(self, seconds: int | None) -> None:
        """Show that something is being worked out; None for nothing."""
        self._progress.layout.display = "none" if seconds is None else None
        if seconds is not None:
            self._busy.value = busy_html(f"Looking into it … {seconds} s")

    def show_findings(
        self,
        findings: Sequence[Finding],
        on_suggestion: Callable[[str], None],
        on_more: Callable[[], None] | None,
    ) -> None:
        """Show a card for each finding; see `finding_cards`."""
        old = self._findings.children
        self._findings.children = finding_cards(findings, on_suggestion, on_more)
        close_all(old)

    def show_entries(
        self,
        entries: Iterable[RegisteredEntry],
        namespace: Mapping[str, Any],
        on_unregister: Callable[[str], None],
    ) -> None:
        """Show what is registered."""
        old = self._rows.children
        rows = [entry_row(entry, namespace, on_unregister) for entry in entries]
        head = "Registered" if rows else "Nothing is registered."
        self._rows.children = [widgets.HTML(f'<p class="head">{head}</p>'), *rows]
        close_all(old)

    def show_steps(self, can_clear: bool, last: str | None) -> None:
        """Say what can be cleared, and what can be undone."""
        self.clear.disabled, self.undo.disabled = not can_clear, last is None
        self.clear.layout.display = None if can_clear else "none"
        self.undo.description = f"Undo {last or ''}".rstrip()
        # Not only disabled: in the laboratory there is another Undo, of what was applied.
        self.undo.layout.display = "none" if last is None else None


def stack(children: list[widgets.Widget], look: str) -> widgets.Box:
    """Put widgets into a box with a look of the style sheet: "row", "stack", "entries"."""
    box = widgets.Box(children)
    box.add_class(f"patchlab-{look}")
    return box


def _button(name: str, look: str) -> widgets.Button:
    button = widgets.Button(description=name)
    button.add_class(f"patchlab-{look}")
    return button
