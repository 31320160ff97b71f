"""Swap: other classes in a model that is built, in place, and back again.

`swap` finds the modules, builds their replacements, gives them the old modules' tensors and state,
and only then hangs them in, so whatever goes wrong before that has changed nothing. `undo` hangs
the very same old modules in again. In a swap every module class may match, torch's own and the
user's too: key "Linear" means `torch.nn.Linear` here, while `patched` replaces classes of
transformers alone, since it decides when they are constructed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import nn

from patchlab.apply.conversions import check_conversions
from patchlab.apply.scope import OnFinding, check_on_finding
from patchlab.apply.swap_build import Built
from patchlab.apply.swap_optimizers import undone_findings
from patchlab.apply.swap_prepare import Prepared, prepare
from patchlab.apply.swap_report import SwapReport
from patchlab.apply.swap_snapshot import Snapshot
from patchlab.apply.swap_steps import Step, commit_steps, take_back
from patchlab.apply.telling import warn_of
from patchlab.errors import TargetError
from patchlab.mapping.registry import registered_mapping
from patchlab.mapping.rules import PatchMapping
from patchlab.model.diff import TreeDiff
from patchlab.model.tree import ModuleTree, module_tree
from patchlab.plan.explain import raise_errors
from patchlab.plan.findings import Finding
from patchlab.plan.plan import Replacement
from patchlab.render.rows import Table
from patchlab.render.shown import Shown


class Swap(Shown, AbstractContextManager["Swap"]):
    """A swap that was done: what it did, and the way back.

    As a context manager it undoes itself at the end of the block. Undoing twice does no harm.
    """

    def __init__(
        self,
        model: nn.Module,
        report: SwapReport,
        steps: list[Step],
        built: list[Built],
        on_finding: OnFinding,
    ) -> None:
        self.model = model
        """The model, the very object that was given."""
        self.report = report
        """What was done, as a value."""
        self._steps = steps
        self._built = built
        self._tells = on_finding != "ignore"
        self._done = True

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """What was replaced, with FQNs."""
        return self.report.replacements

    @property
    def counts(self) -> dict[str, int]:
        """Key → number of modules replaced, 0 included."""
        return self.report.counts

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is odd."""
        return self.report.findings

    @property
    def diff(self) -> TreeDiff:
        """How the module tree has changed."""
        return self.report.diff

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return self.report.ok

    @property
    def undone(self) -> bool:
        """Whether the old modules are back."""
        return not self._done

    def undo(self) -> None:
        """Put the very same old modules back.

        A warning tells of an optimizer that was made during the swap and holds parameters that a
        conversion or a constructor made, in whose place the model has the old ones again.

        Raises:
            SwapError: Something else has been put in place of a new module since, such as by a
                later swap; nothing is changed.
        """
        self._undo(tells=self._tells)

    def _undo(self, *, tells: bool) -> None:
        if not self._done:
            return
        for step in self._steps:
            step.check()
        try:
            take_back(self._steps)
        except BaseException:
            # An interrupt in the middle: every step can be done again, so do them all.
            take_back(self._steps)
            raise
        finally:
            self._done = False
        if tells:
            # Past this function and `undo` or `__exit__`.
            warn_of(undone_findings(self.model, self._built), stacklevel=3)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Over an error that ends the block nothing is said.
        self._undo(tells=self._tells and exc_type is None)

    def to_table(self) -> Table:
        """Return the rows of the report, which says in its caption if the swap was undone."""
        table = self.report.to_table()
        return replace(table, caption=f"{table.caption} · undone") if self.undone else table

    def __str__(self) -> str:
        return f"{self.report}\nundone" if self.undone else str(self.report)

    def __repr__(self) -> str:
        return f"<Swap: {self.report.verdict}{' · undone' if self.undone else ''}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.report._repr_mimebundle_(include, exclude)


def swap(
    model: nn.Module,
    mapping: dict[str, type[nn.Module]] | None = None,
    *,
    conversions: dict[str, list[Any]] | None = None,
    on_finding: OnFinding = "warn",
) -> Swap:
    """Replace modules in a model that is built and loaded, in place, until it is undone.

    The new modules hold the very tensors of the old ones where name and shape agree, so no weight
    is copied, and optimizers, ties and `requires_grad` stay as they are; a parameter that is new
    requires a gradient as its class has it, also in a model that is frozen. Training flag, dtype,
    device, hooks, offloading and the live config are carried over, and so is what was changed since
    the model was built: parts of an earlier swap, adapters, parametrizations, pruning masks. What
    could not be is a finding. Modules that are put in or taken out during the swap are so in the
    new modules alone, and so is what is trained in a tensor that a conversion has made. A dtype or
    device that the model is given during the swap it keeps when that is undone.

    A replacement that only computes otherwise (its class defines `forward`, and nothing that the
    original's constructor could see) takes over the live children. Any other is constructed as the
    original was.

    Args:
        model: Any module; it stays the same object, also where its own class is replaced.
        mapping: Key → replacement class; None for what is registered. Every class in the model may
            match, torch's too. A replacement that defines a class method
            `from_original(cls, original)` is made by that, and taken as it is.
        conversions: Model type or class name → weight conversions, where the replacement keeps its
            weights in another layout than the original.
        on_finding: What to do about findings: "warn" once for each, stop with an "error" before
            anything is changed, or "ignore" them (the report has them in any case).

    Returns:
        A `Swap`: a context manager, with `.undo()` and `.report`.

    Raises:
        SwapError: A module cannot be replaced. Nothing is changed.
        FindingsError: With `on_finding="error"`: a finding is an error, such as weights that have
            no place in the replacement. Nothing is changed.
        MappingError: A rule can never work.
        TargetError: `model` is no module.

    Example:
        >>> import torch, patchlab
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> with patchlab.swap(model, {"Linear": Doubled}) as swapped:
        ...     print(type(model[0]).__name__, swapped.counts)
        Doubled {'Linear': 1}
        >>> type(model[0]).__name__
        'Linear'
    """
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"swap takes a model, got {type(model).__name__}. To patch what is built "
            f"from a config or a folder, use patchlab.patched."
        )
    check_on_finding(on_finding)
    rules = registered_mapping() if mapping is None else PatchMapping.of(mapping)
    given = check_conversions(conversions)
    before = module_tree(model)
    snapshots: list[Snapshot] = []
    steps: list[Step] = []
    try:
        prepared = prepare(model, rules, given, snapshots)
        if on_finding == "error":
            raise_errors("nothing was swapped:", prepared.findings)
        steps += commit_steps(model, prepared.built, prepared.converted, rules, snapshots)
        for step in steps:
            step.do()
        report = _report(model, prepared, before)
        if on_finding != "ignore":
            warn_of(report.findings, stacklevel=2)
        return Swap(model, report, steps, prepared.built, on_finding)
    except BaseException:
        # An interrupt, or a warning that is an error: the caller gets no `Swap` to undo.
        take_back(steps)
        for snapshot in snapshots:
            snapshot.note_changes()
            snapshot.put_back()
        raise


def _report(model: nn.Module, prepared: Prepared, before: ModuleTree) -> SwapReport:
    built, filled = prepared.built, prepared.filled
    return SwapReport(
        class_name=type(model).__name__,
        replacements=prepared.replacements,
        counts=prepared.counts,
        paths=sum(max(1, len(i.site.slots)) + len(i.replaced_parts) for i in built),
        shared=sum(len(f.shared) for f in filled),
        converted=sum(len(f.converted) for f in filled),
        constructed=_fqns(built, [f.constructed for f in filled]),
        dropped=_fqns(built, [f.dropped for f in filled]),
        copied_bytes=sum(f.copied_bytes for f in filled),
        findings=prepared.findings,
        before=before,
        after=module_tree(model),
    )


def _fqns(built: list[Built], names: list[list[str]]) -> tuple[str, ...]:
    return tuple(
        f"{item.site.fqn}.{name}" if item.site.fqn else name
        for item, own in zip(built, names, strict=True)
        for name in own
    )
