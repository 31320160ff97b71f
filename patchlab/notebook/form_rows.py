"""The lists of the form: what is registered, and what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from patchlab.mapping.registry import RegisteredEntry
from patchlab.notebook.form_style import finding_html, line_html
from patchlab.plan.findings import Finding
from patchlab.render.html import text_html
from patchlab.render.numbers import count

MOST_FINDINGS = 4


def finding_cards(
    findings: Sequence[Finding],
    on_suggestion: Callable[[str], None],
    on_more: Callable[[], None] | None,
) -> list[widgets.Widget]:
    """Make a card for each finding, with a button for its suggestion.

    Args:
        findings: All of them, in the order in which they are shown.
        on_suggestion: Called with the key of a suggestion that is clicked.
        on_more: Called when the rest is asked for, which is only counted; None to show it all.
    """
    shown = findings[:MOST_FINDINGS] if on_more is not None else findings
    cards = [_card(finding, on_suggestion) for finding in shown]
    left = len(findings) - len(shown)
    if left and on_more is not None:
        more = _link(f"Show {count(left, 'more finding')}", "")
        more.on_click(lambda _: on_more())
        cards.append(more)
    return cards


def entry_row(
    entry: RegisteredEntry,
    namespace: Mapping[str, Any],
    on_unregister: Callable[[str], None],
) -> widgets.Widget:
    """Make the row of one entry; those of others are told and have no button."""
    name = getattr(entry.replacement, "__qualname__", str(entry.replacement))
    parts = [f"<code>{text_html(str(entry.key))} → {text_html(name)}</code>", _provenance(entry)]
    stale = stale_note(entry, namespace)
    for text, tone in ((entry.problem, "error"), (stale, "warning")):
        if text:
            parts.append(f'<small data-tone="{tone}">{text_html(text)}</small>')
    if entry.is_ours:
        end: widgets.Widget = _link(
            "Unregister", f"patchlab.unregister_patch_mapping({entry.key!r})"
        )
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


def _card(finding: Finding, on_suggestion: Callable[[str], None]) -> widgets.Widget:
    parts: list[widgets.Widget] = [widgets.HTML(finding_html(finding))]
    if finding.suggestion:
        button = _link(f"Use {finding.suggestion}", "Put this key into the form")
        button.add_class("patchlab-key")
        button.on_click(lambda _: on_suggestion(finding.suggestion))
        parts.append(button)
    card = widgets.Box(parts)
    card.add_class("patchlab-card")
    card.add_class(f"patchlab-{finding.severity}")
    return card


def _link(text: str, tooltip: str) -> widgets.Button:
    button = widgets.Button(description=text, tooltip=tooltip)
    button.add_class("patchlab-link")
    return button


def _provenance(entry: RegisteredEntry) -> str:
    # The time and not "2 minutes ago", which would be wrong a minute later.
    at = "" if entry.when is None else time.strftime(" · %H:%M:%S", time.localtime(entry.when))
    return f"<small>{text_html(entry.by + at)}</small>"
