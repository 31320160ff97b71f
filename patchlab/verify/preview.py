"""Previews: what a mapping would replace in a model, shown and judged before anything is built.

The model is built twice on the meta device, unpatched and patched, and the plan is read off the
first: which rule decides which class, and where its modules are. The patched one is the proof.
Nothing of either is left behind, and no weight is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from patchlab._upstream import is_transformers_name
from patchlab.apply.conversions import check_conversions
from patchlab.errors import TargetError
from patchlab.mapping.matching import explain_match
from patchlab.mapping.registry import registered_mapping
from patchlab.mapping.rules import PatchMapping
from patchlab.model.catalog import load_catalog
from patchlab.model.diff import TreeDiff, diff_trees
from patchlab.model.skeleton import model_builder, without_scopes
from patchlab.model.tree import ModuleTree, module_tree
from patchlab.plan.analyses import judge
from patchlab.plan.evidence import Evidence
from patchlab.plan.explain import finding_remarks, raise_errors
from patchlab.plan.findings import Finding, has_errors
from patchlab.plan.plan import PatchPlan, Replacement, grouped
from patchlab.render.numbers import count, human
from patchlab.render.rows import Mark, Table, Tone
from patchlab.render.shown import Shown
from patchlab.verify.dry_run import build_observed, build_patched
from patchlab.verify.forward_evidence import observe_forwards


@dataclass(frozen=True, eq=False, repr=False)
class Preview(Shown):
    """What a mapping would replace in one target; made by `preview`.

    Attributes:
        plan: The replacements: rule → class → modules (FQNs) of the unpatched target.
        before: The tree of the unpatched skeleton.
        after: The tree of the patched one, None if it cannot be built; then a finding says why.
        findings: What is wrong or worth knowing, errors first.
        sub_models: FQN → class name of the sub-models in which something is replaced, "" the root.
        container_names: Names of the matched classes that hold others in the unpatched tree.
    """

    plan: PatchPlan
    before: ModuleTree
    after: ModuleTree | None
    findings: tuple[Finding, ...]
    sub_models: dict[str, str] = field(default_factory=dict)
    container_names: frozenset[str] = frozenset()

    @property
    def mapping(self) -> PatchMapping:
        """The rules."""
        return self.plan.mapping

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """The plan's replacements."""
        return self.plan.replacements

    @property
    def counts(self) -> dict[str, int]:
        """Key → number of modules that it decides, 0 included."""
        return self.plan.counts

    @property
    def counts_by_sub_model(self) -> dict[str, dict[str, int]]:
        """FQN of the innermost sub-model → key → number of modules in it; the root is ""."""
        found: dict[str, dict[str, int]] = {}
        for replacement in self.plan:
            for fqn in replacement.fqns:
                counts = found.setdefault(_innermost(fqn, self.sub_models), {})
                counts[replacement.key] = counts.get(replacement.key, 0) + 1
        return found

    @cached_property
    def diff(self) -> TreeDiff | None:
        """The difference between the trees, None if the patched model cannot be built."""
        return None if self.after is None else diff_trees(self.before, self.after)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_errors(self.findings)

    @cached_property
    def marks(self) -> dict[str, Mark]:
        """FQN → how the module is marked in the tree: matched, container, swallowed, shadowed."""
        return _marks(self)

    def check(self) -> Preview:
        """Return the preview if no finding is an error.

        Raises:
            FindingsError: There are errors; the message has them all.
        """
        raise_errors(self.verdict, self.findings)
        return self

    @property
    def verdict(self) -> str:
        """The result in a line."""
        number = sum(self.counts.values())
        used = sum(decided > 0 for decided in self.counts.values()) or len(self.mapping)
        model = self.before.root.class_name
        parts = [
            f"{count(number, 'module')} replaced by {count(used, 'rule')} in {model}",
            count(len(self.before), "module"),
            f"{human(self.before.num_parameters)} parameters",
        ]
        for severity in ("error", "warning"):
            told = [f for f in self.findings if f.severity == severity]
            if told:
                subject = f": {told[0].subject} ({told[0].title})" if severity == "error" else ""
                parts.append(f"{count(len(told), severity)}{subject}")
        return " · ".join(parts)

    def to_table(self, *, folded: bool = True) -> Table:
        """Return the tree of the unpatched model with what the rules do to it, findings below."""
        table = self.before.to_table(marks=self.marks, folded=folded)
        tone: Tone = "error" if not self.ok else "warning" if self._warned else "ok"
        footer = (*table.footer, *self._sub_model_lines(), *finding_remarks(self.findings))
        return Table(table.columns, table.rows, self.verdict, tone, footer, "Change")

    @property
    def _warned(self) -> bool:
        return any(finding.severity == "warning" for finding in self.findings)

    def _sub_model_lines(self) -> list[str]:
        counts = self.counts_by_sub_model
        if len(counts) < 2:
            return []
        return [
            f"in {fqn or 'the root'} ({self.sub_models[fqn]}): "
            + ", ".join(f"{number} × {key}" for key, number in by_key.items())
            for fqn, by_key in counts.items()
        ]


def preview(
    target: Any,
    mapping: dict[str, type[nn.Module]] | None = None,
    *,
    conversions: dict[str, list[Any]] | None = None,
) -> Preview:
    """Show what a mapping would replace in a target, before anything is built for real.

    Args:
        target: A model, a config, a checkpoint folder, or a model id. Weights are never read.
        mapping: Key → replacement class; None for what is registered.
        conversions: Weight conversions that would be given to the scope; checked for their form.

    Returns:
        The plan, both trees, their difference, and the findings.

    Raises:
        MappingError: A rule can never work.
        ApplyError: A replacement that no instance can become, such as one with `__slots__`.
        TargetError: The target is none of the above, or no model can be built from it even
            unpatched. What goes wrong in the *patched* model is a finding and never raised.
    """
    check_conversions(conversions)
    rules = registered_mapping() if mapping is None else PatchMapping.of(mapping)
    return without_scopes(_preview, target, rules)


def _preview(target: Any, rules: PatchMapping) -> Preview:
    evidence = gather(target, rules)
    sub_models: dict[str, str] = {"": evidence.before.root.class_name}
    for fqn in evidence.plan.fqns:
        above = evidence.sub_model_of(fqn)
        name = evidence.sub_models.get(above, evidence.before.root.class_name)
        sub_models.setdefault(above, name)
    return Preview(
        evidence.plan,
        evidence.before,
        evidence.after,
        judge(evidence),
        sub_models,
        frozenset(c.class_name for c in evidence.containers if c.evidence == "built"),
    )


def gather(target: Any, rules: PatchMapping) -> Evidence:
    """Build and run both skeletons of a target, and note what they show."""
    if isinstance(target, nn.Module):
        # The hull that torch.compile puts around a model shares its config, and is never built.
        target = getattr(target, "_orig_mod", target)
        if getattr(target, "config", None) is None:
            return _as_it_is(target, rules)
    build, config = model_builder(target)
    try:
        observed = build_observed(build, config, rules)
    except TargetError:
        if not isinstance(target, nn.Module):
            raise
        return _as_it_is(target, rules)  # such as a layer, which takes more than its config
    model = observed.model
    assert model is not None
    before = module_tree(model)
    plan = plan_for(before, rules)
    patched = build_patched(build, config, rules)
    after = None if patched.model is None else module_tree(patched.model)
    run_before, run_after = observe_forwards(model, before, patched.model, plan)
    return Evidence(
        rules,
        plan,
        model,
        before,
        after,
        patched.failure,
        load_catalog(),
        observed.calls,
        run_before.calls,
        run_after.calls,
        run_after.failure,
    )


def _as_it_is(model: nn.Module, rules: PatchMapping) -> Evidence:
    """Judge a module that cannot be built a second time by its tree alone."""
    before = module_tree(model)
    return Evidence(rules, plan_for(before, rules), model, before, None, None, load_catalog())


def plan_for(before: ModuleTree, rules: PatchMapping) -> PatchPlan:
    """Return which modules of a tree the rules decide."""
    found = []
    for node in before.nodes:
        if node.shared_with is not None or not is_transformers_name(node.python_module):
            continue
        rule = rules.find(node.class_name)
        if rule is not None and rule.replacement is not node.cls:
            found.append((node.fqn, node.cls, rule))
    return PatchPlan(rules, grouped(found))


def _marks(shown: Preview) -> dict[str, Mark]:
    marks: dict[str, Mark] = {}
    after = set(shown.after.fqns) if shown.after is not None else None
    by_fqn = shown.plan.fqns
    for fqn, replacement in by_fqn.items():
        new = replacement.replacement.__name__
        if replacement.original.__name__ in shown.container_names:
            marks[fqn] = Mark("error", "✕", "container", new)
        else:
            match = explain_match(replacement.original.__name__, shown.mapping)
            note = "replaced" if match.kind == "exact" else "by pattern"
            if match.shadowed:
                note += f", before {match.shadowed[0].key}"
            marks[fqn] = Mark("match", "●", note, new)
    outer: list[str | None] = []  # the outermost matched module above each node, in preorder
    for node in shown.before.nodes:
        above = outer[node.parent] if node.parent >= 0 else None
        if above is None and node.parent >= 0:
            fqn = shown.before.fqns[node.parent]
            above = fqn if fqn in by_fqn else None
        outer.append(above)
        if above is None:
            continue
        # Without a patched skeleton to look at, a container is known to drop what it holds.
        contained = marks[above].note == "container"
        if contained if after is None else node.fqn not in after:
            marks[node.fqn] = Mark("struck", "", "swallowed")
    return marks


def _innermost(fqn: str, sub_models: dict[str, str]) -> str:
    parts = fqn.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    return next((name for name in above if name in sub_models), "")
