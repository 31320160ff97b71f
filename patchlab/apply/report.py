"""The report of a scope: every model built inside, what was replaced, and what is odd.

The report is there from the start of the block and fills as models are built; when the scope closes
it is settled. It holds models weakly: a report that is kept keeps no model alive.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from patchlab.apply.construct import Frame, Replaced
from patchlab.apply.hooks import without_registered
from patchlab.apply.uninitialized import LeftTensor, left_findings, left_in
from patchlab.model.diff import TreeDiff, diff_trees
from patchlab.model.skeleton import original_skeleton, without_scopes
from patchlab.model.walk import paths
from patchlab.plan.dead_keys import dead_key_findings
from patchlab.plan.explain import finding_lines, finding_remarks
from patchlab.plan.findings import Finding, has_errors, ordered
from patchlab.plan.loaded import loaded_overmatches
from patchlab.plan.plan import Replacement, counts_of, grouped
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table, Tone
from patchlab.render.shown import Shown


@dataclass(frozen=True, eq=False)
class ModelReport:
    """One model built inside a scope.

    Attributes:
        class_name: The class of the model.
        replacements: What was replaced in it, with FQNs.
        counts: Key → number of modules replaced, 0 included.
        class_names: The names of its modules' classes, as they were before the patch.
        reference: The model, weakly; see `model`.
        left: Tensors of the replacements that a load has not filled.
    """

    class_name: str
    replacements: tuple[Replacement, ...]
    counts: dict[str, int]
    class_names: frozenset[str]
    reference: weakref.ref[nn.Module]
    left: tuple[LeftTensor, ...] = ()

    @property
    def model(self) -> nn.Module | None:
        """The model, None if it is gone."""
        return self.reference()

    @property
    def diff(self) -> TreeDiff:
        """How the model differs from the same model built without the patch, on the meta device.

        Raises:
            TargetError: The model is gone, or has no config to build the unpatched one from.
        """
        originals = [r.original for r in self.replacements if "" in r.fqns]

        def both() -> tuple[nn.Module, nn.Module]:
            with without_registered():
                return original_skeleton(self.reference(), self.class_name, originals)

        return diff_trees(*without_scopes(both))

    @property
    def summary(self) -> str:
        """What was replaced, in a line."""
        return ", ".join(r.summary for r in self.replacements) or "nothing replaced"

    def __repr__(self) -> str:
        return f"ModelReport({self.class_name}: {self.summary})"


class PatchReport(Shown):
    """What happened under one scope: its models, counts and findings, and whether it was restored.

    Yielded by `patched` and `apply_patches`; complete when the block has ended.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        # By the id of the model, with the place in the order of completion. Looked up and never
        # searched, as is what was replaced: a block may build very many models.
        self._completed: dict[int, tuple[int, ModelReport]] = {}
        self._gone: list[tuple[int, ModelReport]] = []
        self._order = itertools.count()
        self._by_id: dict[int, Replaced] = {}
        self._known = 0
        self._settled: tuple[ModelReport, ...] | None = None
        self.restored = False
        """Whether the scope is closed and everything it changed is as it was."""

    @property
    def models(self) -> tuple[ModelReport, ...]:
        """Each model built inside, in order; sub-models count within their root."""
        if self._settled is not None:
            return self._settled
        return self._model_reports()

    @property
    def counts(self) -> dict[str, int]:
        """Key → number of modules replaced in the whole block, 0 included."""
        return self._frame.counts

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """What was replaced in all models together, by rule and class; FQNs as in each model."""
        return tuple(r for model in self.models for r in model.replacements)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is odd: containers that were replaced, keys that replaced nothing in any model."""
        mapping, models = self._frame.mapping, self.models
        overmatches = loaded_overmatches(mapping, self._frame.attempted)
        if not models:
            return overmatches
        names = frozenset().union(*(model.class_names for model in models))
        several = len(models) > 1
        dead = dead_key_findings(mapping, self.counts, names, several_models=several)
        # A key whose replacement was begun and failed is not dead; the error has said what it is.
        attempted = list(self._frame.attempted)
        tried = {rule.key for cls in attempted if (rule := mapping.find(cls.__name__)) is not None}
        left = left_findings(item for model in models for item in model.left)
        return ordered((*overmatches, *(f for f in dead if f.key not in tried), *left))

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_errors(self.findings)

    def complete(self, model: nn.Module) -> None:
        """Note a model that is whole; its parts, noted before, become part of it."""
        walked = paths(model)
        for _, module in walked:
            noted = self._completed.pop(id(module), None)
            if noted is not None and noted[1].reference() is None:
                self._gone.append(noted)  # a model that is gone, whose id has been used again
        report = _report_of(model, walked, self._replaced_by_id(), self._frame)
        self._completed[id(model)] = (next(self._order), report)

    def settle(self) -> None:
        """Fix the models as they are now, at the end of the block."""
        if self._settled is None:
            self._settled = self._model_reports()

    def to_table(self, *args: Any, **options: Any) -> Table:
        """Return the report as rows: a row for each model and replacement."""
        rows = []
        for model in self.models:
            rows.append(Row(0, model.class_name, ("", ""), note=self._state(model)))
            for r in model.replacements:
                cells = (f"{r.original.__name__} → {r.replacement.__name__}", str(len(r.fqns)))
                title = ", ".join(r.fqns[:12]) + (" …" if len(r.fqns) > 12 else "")
                rows.append(Row(1, r.key, cells, "match", mark="●", note="replaced", title=title))
        columns = (
            Column("Model, key", mono=True),
            Column("Class", mono=True),
            Column("Modules", "right"),
        )
        tone: Tone = "error" if not self.ok else "warning" if self.findings else "ok"
        footer = finding_remarks(self.findings)
        return Table(columns, tuple(rows), self._verdict(), tone, footer)

    def to_text(self, **options: Any) -> str:
        """Return the report as text: a line for each model, then the findings."""
        lines = [f"{m.class_name}: {m.summary}{self._closing()}" for m in self.models]
        if not lines:
            lines = [f"no model was built{self._closing()}"]
        return "\n".join([*lines, *finding_lines(self.findings)])

    def __repr__(self) -> str:
        return self.to_text()

    def _model_reports(self) -> tuple[ModelReport, ...]:
        """Return the reports of the models that are roots, those that are gone included."""
        frame, by_id = self._frame, self._replaced_by_id()
        alive = [model for ref in list(frame.built) if (model := ref()) is not None]
        alive += [module for r in list(frame.replaced) if (module := r.module()) is not None]
        walks: dict[int, tuple[nn.Module, list[tuple[str, nn.Module]]]] = {}
        parts: set[int] = set()
        for model in alive:
            if id(model) not in parts and id(model) not in walks:
                walks[id(model)] = (model, paths(model))
                parts.update(id(part) for _, part in walks[id(model)][1][1:])
        noted = [*self._gone, *self._completed.values()]
        gone = [noted_as for noted_as in noted if noted_as[1].reference() is None]
        gone.sort(key=lambda noted_as: noted_as[0])
        roots = [walk for root, walk in walks.items() if root not in parts]
        return (
            *(known for _, known in gone),
            *(_report_of(model, walked, by_id, frame) for model, walked in roots),
        )

    def _replaced_by_id(self) -> dict[int, Replaced]:
        """Return what was replaced by the id of the module, brought up to date; ids are reused."""
        fresh = self._frame.replaced[self._known :]
        self._known += len(fresh)
        for known in fresh:
            module = known.module()
            if module is not None:
                self._by_id[id(module)] = known
        return self._by_id

    def _closing(self) -> str:
        return " · restored" if self.restored else " · still open"

    def _state(self, model: ModelReport) -> str:
        return "" if model.replacements else "nothing replaced"

    def _verdict(self) -> str:
        replaced = count(sum(self.counts.values()), "module")
        return f"{replaced} replaced in {count(len(self.models), 'model')}{self._closing()}"


def _report_of(
    model: nn.Module,
    walked: list[tuple[str, nn.Module]],
    by_id: dict[int, Replaced],
    frame: Frame,
) -> ModelReport:
    found = []
    names = set()
    for fqn, module in walked:
        replaced = by_id.get(id(module))
        if replaced is not None and replaced.module() is module:
            names.add(replaced.original.__name__)
            found.append((fqn, replaced.original, replaced.rule))
            continue
        other = frame.elsewhere.get(id(module))
        if other is not None and other.module() is module:
            names.add(other.original.__name__)  # An inner scope's rule decided here.
        else:
            names.add(type(module).__name__)
    replacements = grouped(found)
    return ModelReport(
        type(model).__name__,
        replacements,
        counts_of(frame.mapping, replacements),
        frozenset(names),
        weakref.ref(model),
        tuple(left_in(walked, replacements, frame)),
    )
