"""Status: what is registered, by whom, and what a patch left behind in this process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from patchlab.apply.construct import open_scope_count
from patchlab.apply.hooks import hook_stands
from patchlab.mapping.registry import RegisteredEntry, registered_entries
from patchlab.plan.explain import finding_remarks
from patchlab.plan.findings import Finding, has_errors, ordered
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table
from patchlab.render.shown import Shown
from patchlab.verify.leaks import Leak, find_leaks, mend


@dataclass(frozen=True, eq=False, repr=False)
class Status(Shown):
    """The state of patching in this process, at the moment `status()` was called.

    Attributes:
        entries: What is registered, in order, with provenance.
        leaks: What is not what it was although no patch is on.
        open_scopes: The number of scopes open in the process, in all contexts; what previews build
            for a moment is none.
        hooked: Whether `from_pretrained` and `from_config` go through patchlab.
        process: The id of the process; registries are per process.
    """

    entries: tuple[RegisteredEntry, ...]
    leaks: tuple[Leak, ...]
    open_scopes: int
    hooked: bool
    process: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing is registered, open or left behind."""
        return not self.entries and not self.leaks and not self.open_scopes

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The leaks (PL401) and the entries of others (PL402) as findings."""
        leaks = (
            Finding("PL401", "error", "", leak.name, f"{leak.message} status().repair() mends it.")
            for leak in self.leaks
        )
        foreign = (
            Finding(
                "PL402",
                "warning" if entry.problem else "info",
                entry.key,
                entry.key,
                f"key {entry.key!r} → {entry.replacement.__name__} was not registered through "
                f"patchlab. {entry.problem}".rstrip(),
            )
            for entry in self.entries
            if not entry.is_ours
        )
        return ordered((*leaks, *foreign))

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_errors(self.findings)

    def repair(self) -> Status:
        """Put back what was left behind, and return the status afterwards.

        Raises:
            RestoreError: An original is gone and its source cannot be read; the rest is mended.
        """
        # Names first: the source of a recorder is read through them.
        for leak in sorted(self.leaks, key=lambda leak: leak.kind == "recorder"):
            mend(leak)
        return status()

    def to_table(self) -> Table:
        """Return the entries as rows, with the leaks below."""
        rows = tuple(
            Row(
                0,
                entry.key,
                (entry.replacement.__qualname__, entry.replacement.__module__, _when(entry)),
                "plain" if entry.is_ours and not entry.problem else "warning",
                mark="" if not entry.problem else "!",
                note=entry.by if not entry.problem else "never matches",
                title=entry.problem,
            )
            for entry in self.entries
        )
        columns = (
            Column("Key", mono=True),
            Column("Replacement", mono=True),
            Column("From", mono=True),
            Column("When"),
        )
        return Table(
            columns,
            rows,
            self._verdict(),
            "error" if self.leaks else "ok" if self.is_clean else "plain",
            finding_remarks(self.findings),
            "Registered by",
        )

    def _verdict(self) -> str:
        registered = f"{len(self.entries)} registered" if self.entries else "nothing registered"
        parts = [registered]
        if self.open_scopes:
            parts.append(count(self.open_scopes, "open scope"))
        parts.append(f"{len(self.leaks)} left behind" if self.leaks else "nothing left behind")
        hook = "hook in place" if self.hooked else "transformers' own loading"
        return " · ".join([*parts, hook, f"process {self.process}"])


def status() -> Status:
    """Return what is registered in this process, by whom, and what a patch left behind.

    Registries are per process: a spawned worker starts with an empty one, and says so here.
    """
    return Status(
        registered_entries(), find_leaks(), open_scope_count(), hook_stands(), os.getpid()
    )


def _when(entry: RegisteredEntry) -> str:
    if entry.when is None:
        return ""
    return time.strftime("%H:%M:%S", time.localtime(entry.when))
