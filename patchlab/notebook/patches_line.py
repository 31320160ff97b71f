"""`%patches`: the registry from one line."""

from __future__ import annotations

import contextlib
import difflib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from patchlab.errors import CatalogError, PatchlabError
from patchlab.mapping.registry import RegisteredEntry, registered_by, registered_entries
from patchlab.mapping.rules import PatchMapping
from patchlab.notebook.magic_line import MagicLine, parse_line, resolve_mapping, split_rule
from patchlab.plan.dead_keys import unknown_key_findings
from patchlab.plan.explain import finding_remarks
from patchlab.plan.findings import Finding
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table
from patchlab.render.shown import Shown


@dataclass(frozen=True, slots=True, repr=False)
class Registered(Shown):
    """What is registered, as a table: key, replacement class, by whom and when.

    Attributes:
        entries: In the order in which patterns are tried.
        findings: Keys just registered that are the name of no class (PL104).
    """

    entries: tuple[RegisteredEntry, ...]
    findings: tuple[Finding, ...] = ()

    def to_table(self, **options: Any) -> Table:
        """Return one row for each entry, in the order in which patterns are tried."""
        return Table(
            columns=(
                Column("Key", mono=True),
                Column("Replacement", mono=True),
                Column("Registered by"),
                Column("When"),
            ),
            rows=tuple(
                Row(
                    0,
                    str(entry.key),
                    (_class_name(entry.replacement), entry.by, _clock(entry.when)),
                    tone="error" if entry.problem else "plain",
                    mark="✕" if entry.problem else "",
                    note="never matches" if entry.problem else "",
                    title=entry.problem,
                )
                for entry in self.entries
            ),
            caption=f"{count(len(self.entries), 'rule')} registered",
            footer=finding_remarks(self.findings),
        )


def run_command(line: str, namespace: Mapping[str, Any]) -> Any:
    """Carry out a `%patches` line and return what it shows.

    Raises:
        UsageError: There is no such command, or it cannot be carried out.
    """
    options = parse_line(line, valued=("--map",), flags=("--overwrite",), words=True)
    first = line.split(maxsplit=1)[0] if line.strip() else "list"
    # The command comes first; a line that begins with a rule has forgotten it.
    command = first if first in options.words or not line.strip() else ""
    action = _COMMANDS.get(command)
    if action is None:
        near = difflib.get_close_matches(first, list(_COMMANDS), n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(_COMMANDS)}."
        if options.rules and not command:
            hint = f"To register it: %patches register {line.strip()}"
        raise UsageError(f"%patches {first}: there is no such command. {hint}")
    try:
        return action(options, options.words[1:], namespace)
    except PatchlabError as error:
        # What a call is told of as an argument is an option of the line.
        message = str(error).replace("overwrite=True", "--overwrite")
        message = re.sub(r"unregister_patch_mapping\('(.*?)'\)", r"%patches unregister \1", message)
        raise UsageError(message) from error


def _list(options: MagicLine, words: tuple[str, ...], namespace: Mapping[str, Any]) -> Registered:
    _refuse_rest("list", options, words)
    return Registered(registered_entries())


def _register(
    options: MagicLine, words: tuple[str, ...], namespace: Mapping[str, Any]
) -> Registered:
    from patchlab.apply.hooks import register_patch_mapping

    for word in words:
        split_rule(word)  # It has no "=", so this says what a rule is.
    if not options.rules:
        raise UsageError("%patches register needs a rule: %patches register LlamaMLP=MyMLP.")
    mapping = resolve_mapping(options.rules, namespace)
    with registered_by("magic"):
        register_patch_mapping(mapping, overwrite="--overwrite" in options.flags)
    return Registered(registered_entries(), _unknown(mapping))


def _unknown(mapping: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what is wrong with the keys; it is registered, whether or not that can be told."""
    with contextlib.suppress(CatalogError):
        return unknown_key_findings(PatchMapping.of(mapping))
    return ()


def _unregister(
    options: MagicLine, words: tuple[str, ...], namespace: Mapping[str, Any]
) -> Registered:
    from patchlab.apply.hooks import unregister_patch_mapping

    # A key may hold "=", as in "(?=...)"; a word with one was read as a rule.
    keys = [*words, *(f"{key}={name}" for key, name in options.rules)]
    if not keys:
        raise UsageError("%patches unregister needs a key, as %patches shows it.")
    unregister_patch_mapping(keys)
    return Registered(registered_entries())


def _clear(options: MagicLine, words: tuple[str, ...], namespace: Mapping[str, Any]) -> Registered:
    from patchlab.apply.hooks import clear_patch_mapping

    _refuse_rest("clear", options, words)
    clear_patch_mapping()
    return Registered(registered_entries())


def _status(options: MagicLine, words: tuple[str, ...], namespace: Mapping[str, Any]) -> Any:
    from patchlab.verify.status import status

    _refuse_rest("status", options, words)
    return status()


def _export(options: MagicLine, words: tuple[str, ...], namespace: Mapping[str, Any]) -> Any:
    from patchlab.ship.export import export_patches

    if len(words) != 1 or options.rules:
        raise UsageError("%patches export takes one file: %patches export patches.py")
    return export_patches(words[0])


_COMMANDS: dict[str, Callable[[MagicLine, tuple[str, ...], Mapping[str, Any]], Any]] = {
    "list": _list,
    "register": _register,
    "unregister": _unregister,
    "clear": _clear,
    "status": _status,
    "export": _export,
}


def _refuse_rest(command: str, options: MagicLine, words: tuple[str, ...]) -> None:
    if words or options.rules:
        raise UsageError(f"%patches {command} takes nothing after it.")


def _class_name(cls: Any) -> str:
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"


def _clock(when: float | None) -> str:
    return "" if when is None else time.strftime("%H:%M:%S", time.localtime(when))
