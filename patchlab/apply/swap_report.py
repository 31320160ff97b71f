"""What a swap did, as a value: replacements, tensors shared and converted, and what is odd."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from patchlab.model.diff import TreeDiff, diff_trees
from patchlab.model.tree import ModuleTree
from patchlab.plan.explain import finding_remarks
from patchlab.plan.findings import Finding, has_errors
from patchlab.plan.plan import Replacement
from patchlab.render.rows import Column, Row, Table, Tone
from patchlab.render.shown import Shown


@dataclass(frozen=True, eq=False, repr=False)
class SwapReport(Shown):
    """What a swap did to a model.

    Attributes:
        class_name: The class of the model.
        replacements: What was replaced, with FQNs; a module at several paths counts once.
        counts: Key → number of modules replaced, 0 included.
        paths: How many places these modules hang at.
        shared: Tensors that the new modules hold and the old ones held: the very objects.
        converted: Tensors that a weight conversion made.
        constructed: FQNs of parameters and buffers that only the replacement's constructor gave.
        dropped: FQNs of tensors of the old modules that the new ones have no use for.
        copied_bytes: The size of what was converted.
        findings: What is odd.
        before: The module tree before the swap.
        after: The module tree after it.
    """

    class_name: str
    replacements: tuple[Replacement, ...]
    counts: dict[str, int]
    paths: int
    shared: int
    converted: int
    constructed: tuple[str, ...]
    dropped: tuple[str, ...]
    copied_bytes: int
    findings: tuple[Finding, ...]
    before: ModuleTree
    after: ModuleTree

    @cached_property
    def diff(self) -> TreeDiff:
        """How the module tree has changed."""
        return diff_trees(self.before, self.after)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_errors(self.findings)

    @property
    def summary(self) -> str:
        """What was replaced, in a line."""
        return ", ".join(r.summary for r in self.replacements) or "nothing replaced"

    @property
    def verdict(self) -> str:
        """The line above the table."""
        modules = sum(self.counts.values())
        if not modules:
            return f"{self.class_name}: nothing replaced"
        where = f", {self.paths} paths" if self.paths != modules else ""
        made = f" · {self.converted} converted" if self.converted else ""
        new = f" · {len(self.constructed)} new" if self.constructed else ""
        return (
            f"{self.class_name}: {modules} module{'s' * (modules != 1)}{where} replaced · "
            f"{self.shared} tensor{'s' * (self.shared != 1)} shared{made}{new} · "
            f"{self.copied_bytes:,} bytes copied"
        )

    def to_table(self) -> Table:
        """Return a row for each replacement, with the findings below."""
        rows = []
        for r in self.replacements:
            cells = (f"{r.original.__name__} → {r.replacement.__name__}", str(len(r.fqns)))
            title = ", ".join(fqn or "the root" for fqn in r.fqns[:12])
            title += " …" * (len(r.fqns) > 12)
            rows.append(Row(0, r.key, cells, "match", mark="●", note="replaced", title=title))
        columns = (Column("Key", mono=True), Column("Class", mono=True), Column("Modules", "right"))
        tone: Tone = "error" if not self.ok else "warning" if self.findings else "ok"
        footer = finding_remarks(self.findings)
        return Table(columns, tuple(rows), self.verdict, tone, footer)
