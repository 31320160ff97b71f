"""The lists of the form: what is registered, and what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets as widgets

from patchlab.mapping.registry import RegisteredEntry
from patchlab.notebook.form_style import finding_html, line_html
from patchlab.plan.findings import Finding
from patchlab.render.html import text_html
from patchlab.render.numbers import count

MOST_FINDINGS = 6


def finding_list(
    findings: Iterable[Finding], on_suggestion: Callable[[str], None]
) -> list[widgets.Widget]:
    """Make a card for each finding, with a button for its suggestion; the rest is counted."""
    found = list(findings)
    cards: list[widgets.Widget] = []
    for finding in found[:MOST_FINDINGS]:
        cards.append(widgets.HTML(finding_html(finding)))
        if finding.suggestion:
            cards.append(_suggestion_button(finding.suggestion, on_suggestion))
    if len(found) > MOST_FINDINGS:
        cards.append(widgets.HTML(line_html(f"… {count(len(found) - MOST_FINDINGS, 'more')}")))
    return cards


def entry_row(
    entry: RegisteredEntry,
    namespace: Mapping[str, Any],
    on_unregister: Callable[[str], None],
) -> widgets.Widget:
    """Make the row of one entry; those of others are told and have no button."""
    name = getattr(entry.replacement, "__qualname__", str(entry.replacement))
    parts = [f"<code>{text_html(entry.key)} → {text_html(name)}</code>", _provenance(entry)]
    stale = stale_note(entry, namespace)
    for text, tone in ((entry.problem, "error"), (stale, "warning")):
        if text:
            parts.append(f'<small data-tone="{tone}">{text_html(text)}</small>')
    if entry.is_ours:
        end: widgets.Widget = widgets.Button(
            description="Unregister", tooltip=f"patchlab.unregister_patch_mapping({entry.key!r})"
        )
        end.add_class("patchlab-link")
        end.on_click(lambda _: on_unregister(entry.key))
    else:
        end = widgets.HTML(line_html("not ours"))
    row = widgets.HBox([widgets.HTML("".join(parts)), end])
    row.add_class("patchlab-entry")
    return row


def stale_note(entry: RegisteredEntry, namespace: Mapping[str, Any]) -> str:
    """Say that the notebook has defined an entry's class again since, "" if it has not."""
    registered = entry.replacement
    name = getattr(registered, "__qualname__", "")
    current = namespace.get(name)
    if (
        current is registered
        or not isinstance(current, type)
        or getattr(registered, "__module__", None) != current.__module__
    ):
        return ""
    return f"{name} has been defined again since. Register it once more to use the new one."


def close_all(shown: Iterable[widgets.Widget]) -> None:
    """Close widgets with what is in them."""
    for widget in shown:
        close_all(getattr(widget, "children", ()))
        widget.close()


def _suggestion_button(key: str, on_suggestion: Callable[[str], None]) -> widgets.Button:
    button = widgets.Button(description=f"Use {key}", tooltip="Put this key into the form")
    button.add_class("patchlab-link")
    button.add_class("patchlab-key")
    button.on_click(lambda _: on_suggestion(key))
    return button


def _provenance(entry: RegisteredEntry) -> str:
    # The time and not "2 minutes ago", which would be wrong a minute later.
    at = "" if entry.when is None else time.strftime(" · %H:%M:%S", time.localtime(entry.when))
    return f"<small>{text_html(entry.by + at)}</small>"
