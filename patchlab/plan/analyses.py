"""The analyses of a plan, in one list: adding one touches nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from patchlab.plan import contract, couplings, overmatch, parallel
from patchlab.plan.dead_keys import dead_key_findings
from patchlab.plan.evidence import Evidence
from patchlab.plan.findings import Finding, ordered

Analysis = Callable[[Evidence], Iterable[Finding]]


def dead_keys(evidence: Evidence) -> tuple[Finding, ...]:
    """PL104 and PL105: keys that replace nothing, rules that never decide."""
    return dead_key_findings(
        evidence.mapping,
        evidence.plan.counts,
        {node.class_name for node in evidence.before.nodes},
        catalog=evidence.catalog,
    )


ANALYSES: tuple[Analysis, ...] = (
    overmatch.containers,
    overmatch.searched_names,
    overmatch.other_names,
    dead_keys,
    overmatch.sub_models,
    overmatch.swallowed_modules,
    overmatch.several_roles,
    couplings.only_forward,
    overmatch.other_architectures,
    contract.constructors,
    contract.build_failure,
    contract.forward_arguments,
    contract.return_arity,
    couplings.base_classes,
    couplings.names_others_list,
    contract.never_called,
    couplings.tied_weights,
    parallel.tensor_parallel,
    parallel.expert_parallel,
)


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """Run every analysis; errors first."""
    return ordered(finding for analysis in ANALYSES for finding in analysis(evidence))
