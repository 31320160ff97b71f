"""Parallel plans: what tensor and expert parallelism would make of a patched model (PL501).

A model carries its plan: module names with `*` for numbers → how the module is split
(`base_model_tp_plan` and `_tp_plan`, transformers 5.24.0, `distributed/mixin.py`). A replacement
keeps the plan as long as it keeps the names, and computes over what is whole:

    class Wrong(nn.Module):                     # of LlamaMLP
        def forward(self, x):
            h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)     # of this rank's part
            return self.down_proj(h)

Each rank normalizes its own part: another model, without an error (1.76 on logits of a tiny Llama
on two ranks). Right is a norm outside of the split part, or a plan that does not split these
modules. What is silent is a warning, what only fails or costs memory is for information; whether it
happens, `python -m patchlab probe-parallel` finds out by running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from patchlab.model.nodes import ModuleNode
from patchlab.model.tree import ModuleTree
from patchlab.plan.evidence import Evidence
from patchlab.plan.findings import Finding, Severity
from patchlab.plan.plan import Replacement
from patchlab.plan.sharded_code import head_counts, own_methods, reductions
from patchlab.plan.wording import listed
from patchlab.render.numbers import count

# Styles that sum what the ranks return, and so need every rank to return a part.
_SUMS = ("moe_tp_experts", "all_reduce")
_SPLIT_OUTPUT = ("colwise", "packed_colwise")
# What a style becomes where the input is whole on every rank, and so are its gradients.
_WHOLE = {"rowwise": "rowwise_split_input", "replicated_with_grad_allreduce": "replicate"}
_SPLIT_INPUT = ("rowwise", "packed_rowwise")


@dataclass(frozen=True, slots=True)
class _Place:
    """The modules of one replacement that have one name but for numbers.

    Attributes:
        base: The name, with `*` for numbers.
        rules: The rules at and below it that name something in the unpatched model.
        lost: Those that name nothing in the patched one.
        before: Name → node, at and below, in the unpatched model.
        after: The same in the patched one.
    """

    replacement: Replacement
    base: str
    rules: Mapping[str, str]
    lost: tuple[str, ...]
    before: Mapping[str, ModuleNode]
    after: Mapping[str, ModuleNode]

    @property
    def kept(self) -> dict[str, str]:
        """The rules that still name something."""
        return {rule: style for rule, style in self.rules.items() if rule not in self.lost}


def tensor_parallel(evidence: Evidence) -> Iterator[Finding]:
    """PL501: rules of the tensor-parallel plan that are lost, and code that splitting breaks."""
    plan = _plan_of(evidence.model, "tp_plan")
    hidden = _hidden_size(evidence.model)
    for place in _places(evidence, plan):
        if place.lost:
            yield _lost_rules(place, hidden)
        else:
            yield from _split_code(place)


def expert_parallel(evidence: Evidence) -> Iterator[Finding]:
    """PL501: experts that expert parallelism cannot hand out, as their parameters are not there."""
    for place in _places(evidence, _plan_of(evidence.model, "ep_plan")):
        if place.lost:
            yield _finding(
                place,
                "info",
                f"the ep_plan hands out {listed([_leaf(rule) for rule in place.lost])}, "
                f"which {place.replacement.replacement.__name__} has not: expert parallelism fails "
                f"(ep_size=1, or keep the parameters of {place.replacement.original.__name__}).",
            )


def _lost_rules(place: _Place, hidden: int) -> Finding:
    """Say what becomes of modules that the plan names and that are not there any more."""
    name = place.replacement.replacement.__name__
    old = listed([_leaf(rule) for rule in place.lost])
    plan = _suggested(place, hidden)
    todo = f" Pass DistributedConfig(tp_plan={plan!r})." if plan else " Pass a tp_plan of your own."
    kept = place.kept
    if any(style in _SUMS for style in kept.values()):
        return _finding(
            place,
            "warning",
            f"the tp_plan splits {old}, which {name} has not, and still sums what the ranks "
            f"return: every rank computes the whole, and the sum is as many times too large, "
            f"without an error.{todo}",
        )
    partners = [_leaf(rule) for rule, style in kept.items() if style in _SPLIT_INPUT]
    if partners:
        return _finding(
            place,
            "info",
            f"the tp_plan splits {old}, which {name} has not, and still splits the input of "
            f"{listed(partners)}: under tensor parallelism the shapes do not fit.{todo}",
        )
    return _finding(
        place,
        "info",
        f"the tp_plan splits {old}, which {name} has not: under tensor parallelism every rank "
        f"holds and computes the whole, {count(len(place.replacement.fqns), 'module')}. The "
        f"result is right.{todo}",
    )


def _split_code(place: _Place) -> Iterator[Finding]:
    """Read the replacement's own code for what is wrong on a rank's part."""
    children = {_leaf(rule): style for rule, style in place.kept.items() if _is_child(rule, place)}
    split = frozenset(name for name, style in children.items() if style in _SPLIT_OUTPUT)
    if not split:
        return
    replacement = place.replacement.replacement
    methods = own_methods(replacement)
    heads = sorted({read for method in methods for read in head_counts(method, replacement)})
    if heads:
        yield _finding(
            place,
            "info",
            f"{replacement.__name__} shapes tensors by {listed(heads)}, the number in all ranks "
            f"together; under tensor parallelism {listed(sorted(split))} give a rank its part of "
            f"the heads, and the shapes do not fit. Write -1 for the number of heads.",
        )
    norms = frozenset(
        _leaf(name) for name, node in place.after.items() if "Norm" in node.class_name
    ) - {name for name, style in children.items() if style}
    joined = frozenset(name for name, style in children.items() if style in _SPLIT_INPUT)
    for text, line in dict.fromkeys(
        found for method in methods for found in reductions(method, split, joined, norms)
    ):
        yield _finding(
            place,
            "warning",
            f"{replacement.__name__}.forward reduces over what tensor parallelism splits: {text} "
            f"(line {line}) sees only this rank's part, and computes something else, without an "
            f"error. python -m patchlab probe-parallel shows by how much; leave "
            f"{listed(sorted(split | joined))} out of the plan ('replicate') if so.",
        )


def _places(evidence: Evidence, plan: Mapping[str, str]) -> Iterator[_Place]:
    if not plan or evidence.after is None:
        return
    for replacement in evidence.plan:
        seen: set[str] = set()
        for fqn in replacement.fqns:
            base = wildcarded(fqn)
            if base in seen:
                continue
            seen.add(base)
            rules = {rule: plan[rule] for rule in plan if rule == base or _below(rule, base)}
            if not rules or not _is_there(evidence.after, fqn, replacement):
                continue
            before = {wildcarded(n.fqn): n for n in _subtree(evidence.before, fqn)}
            after = {wildcarded(n.fqn): n for n in _subtree(evidence.after, fqn)}
            had, has = _names(before), _names(after)
            meant = {rule: style for rule, style in rules.items() if rule in had}
            lost = tuple(rule for rule in meant if rule not in has)
            yield _Place(replacement, base, meant, lost, before, after)


def _suggested(place: _Place, hidden: int) -> dict[str, str]:
    """Return rules for what is new, as far as the shapes say which part it plays."""
    linear = [(name, shape) for name in place.after if (shape := _weight(place.after[name]))]
    new = [(name, shape) for name, shape in linear if name not in place.rules]
    gone = [(rule, shape) for rule in place.lost for shape in _shapes(rule, place.before)]
    plan: dict[str, str] = {}
    for name, shape in new:
        # Of several that have one shape (query and output, often) the first is the first.
        same = next((rule for rule, other in gone if other == shape), None)
        if same is not None:
            plan[name] = place.rules[same]
            gone = [item for item in gone if item[0] != same]
        elif _is_fused(shape, [other for _, other in gone]):
            # Split, it would load right and save its rows in the order of the ranks. So it stays
            # whole, and what comes after it with it.
            kept = place.kept.items()
            return {rule: _WHOLE[style] for rule, style in kept if style in _WHOLE}
        elif hidden and hidden in shape and shape[0] != shape[1]:
            plan[name] = "colwise" if shape[1] == hidden else "rowwise"
    if sorted(plan.values()).count("rowwise") == 0 and not any(
        style in _SPLIT_INPUT for style in place.kept.values()
    ):
        return {}
    # What has been split further down is summed there.
    sums = {rule: "replicate" for rule, style in place.kept.items() if style in _SUMS}
    return plan | sums


def _is_fused(shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> bool:
    """Tell whether a weight can be several of the lost ones, one below the other."""
    rows = [part[0] for part in parts if len(part) == 2 and part[1] == shape[1]]
    return any(sum(rows[:number]) == shape[0] for number in range(2, len(rows) + 1))


def _shapes(rule: str, nodes: Mapping[str, ModuleNode]) -> list[tuple[int, ...]]:
    node = nodes.get(rule)
    return [shape] if node is not None and (shape := _weight(node)) else []


def _weight(node: ModuleNode) -> tuple[int, ...]:
    """Return the shape of a module's weight if it is a matrix, () otherwise."""
    for tensor in node.parameters:
        if tensor.name == "weight" and tensor.shape is not None and len(tensor.shape) == 2:
            return tensor.shape
    return ()


def _names(nodes: Mapping[str, ModuleNode]) -> set[str]:
    names = set(nodes)
    for name, node in nodes.items():
        names |= {f"{name}.{tensor.name}" for tensor in node.parameters}
    return names


def _subtree(tree: ModuleTree, fqn: str) -> Iterable[ModuleNode]:
    root = tree.find(fqn)
    yield root
    for node in tree.nodes[root.index + 1 :]:
        if node.depth <= root.depth:
            return
        yield node


def _is_there(after: ModuleTree, fqn: str, replacement: Replacement) -> bool:
    return fqn in after.fqns and after.find(fqn).cls is replacement.replacement


def _plan_of(model: Any, name: str) -> dict[str, str]:
    plan = getattr(model, name, None)
    return dict(plan) if isinstance(plan, dict) else {}


def _hidden_size(model: Any) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "hidden_size", 0)
    return size if isinstance(size, int) else 0


def wildcarded(name: str) -> str:
    """Return a name as plans write it: a number between dots, or at the end, is `*`.

    `replace_layer_number_by_wildcard` (transformers 5.24.0, `distributed/parallel_utils.py`).
    """
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def _below(rule: str, base: str) -> bool:
    return rule.startswith(f"{base}.") if base else True


def _is_child(rule: str, place: _Place) -> bool:
    return rule.rpartition(".")[0] == place.base


def _leaf(rule: str) -> str:
    return rule.rpartition(".")[2]


def _finding(place: _Place, severity: Severity, message: str) -> Finding:
    return Finding(
        "PL501",
        severity,
        place.replacement.key,
        place.replacement.original.__name__,
        message,
    )
