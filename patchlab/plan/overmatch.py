"""Over-matches: what a key hits beyond what its author means (PL101-PL103, PL106-PL110).

The severities follow what was measured over 790 architectures of transformers 5.24.0: of the
matched sub-models 30 builds raised and 25 lost the sub-model; every inner module of a container
that was predicted to vanish did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from patchlab.mapping.rules import compile_pattern
from patchlab.model.tree import ModuleNode, ModuleTree
from patchlab.plan.containers import fitting_numbers
from patchlab.plan.evidence import Evidence
from patchlab.plan.findings import Finding, Severity
from patchlab.plan.plan import Replacement
from patchlab.plan.readings import readings_of
from patchlab.plan.wording import constructor_parameters, listed
from patchlab.render.numbers import count

_MODELS = "transformers.models."


def containers(evidence: Evidence) -> Iterator[Finding]:
    """PL101: a matched class holds, at any depth, another class that would go with it."""
    readings = {c.key: readings_of(evidence, c.key) for c in evidence.containers}
    told: set[str] = set()
    # In the order in which findings are shown, so that the advice stands in the first of a key.
    for container in sorted(evidence.containers, key=lambda c: (c.evidence, c.class_name)):
        found = readings[container.key]
        total = _modules_of(evidence, container.key, container.class_name)
        holding = _holding(evidence, total)
        if container.evidence == "built":
            severity: Severity = "error"
            built = _held(evidence, holding)
            others = [name for name in container.inner if name not in built]
            more = f", and under another config {listed(others)}" if others else ""
            holds = (
                f"{container.class_name} is a container: it holds {listed(built)} "
                f"({len(holding)} of {len(total)}){more}. Replacing both drops "
                f"{_dropped(evidence, holding)}."
            )
        else:
            severity = "warning"
            holds = (
                f"{container.class_name} can be a container: under another config it holds "
                f"{listed(container.inner)}, at {container.path!r}, which would go with it."
            )
        if not found.advice:
            holds += (
                f" Use a rule that does not match {container.class_name}, or one that does not "
                f"match what is inside."
            )
        elif container.key not in told:
            holds += f" {found.advice}"
            told.add(container.key)
        yield Finding("PL101", severity, container.key, container.class_name, holds, found.key)


def searched_names(evidence: Evidence) -> Iterator[Finding]:
    """PL102: transformers itself would search the exact name, and hit more."""
    for rule in evidence.mapping:
        if not rule.is_exact or not evidence.plan.counts.get(rule.key):
            continue  # of a key that replaces nothing here, PL104 tells, and '^key$' is no better
        # A search for an identifier finds it anywhere in a name.
        also = sorted({n for n in evidence.catalog.names if rule.key in n} - {rule.key})
        if also:
            yield Finding(
                "PL102",
                "warning",
                rule.key,
                rule.key,
                f"the exact name {rule.key!r} would also be searched by transformers' own "
                f"patching, and replace {listed(also)} as well. patchlab replaces {rule.key} "
                f"alone. To mean the same everywhere, use '^{rule.key}$'.",
                f"^{rule.key}$",
            )


def other_names(evidence: Evidence) -> Iterator[Finding]:
    """PL103: the key also fits names of transformers that are no module classes."""
    for rule in evidence.mapping:
        if rule.is_exact:
            continue
        fits = compile_pattern(rule.key).search
        also = [name for name in evidence.catalog.other_names if fits(name)]
        if also:
            yield Finding(
                "PL103",
                "warning",
                rule.key,
                also[0],
                f"key {rule.key!r} also fits {count(len(also), 'name')} of transformers that "
                f"{'is' if len(also) == 1 else 'are'} no module class: {listed(also)}. patchlab "
                f"leaves them alone; transformers' own patching would replace them.",
            )


def sub_models(evidence: Evidence) -> Iterator[Finding]:
    """PL106: a matched class is a sub-model, whose config, weights and hooks others count on."""
    for replacement in evidence.plan:
        below = [fqn for fqn in replacement.fqns if fqn in evidence.sub_models and fqn]
        if below and not issubclass(replacement.replacement, replacement.original):
            name = replacement.original.__name__
            yield Finding(
                "PL106",
                "error",
                replacement.key,
                name,
                f"{name} at {listed(below)} is a sub-model (a PreTrainedModel), and "
                f"{replacement.replacement.__name__} is no subclass of it: loading, saving and "
                f"initializing count on it. Subclass {name}, or exclude it from the key.",
                readings_of(evidence, replacement.key, also_drop=[name]).key,
            )


def swallowed_modules(evidence: Evidence) -> Iterator[Finding]:
    """PL107: the replacement builds none of the modules that the original holds.

    The patched skeleton decides, so neither the form of the key nor the bases of the replacement
    matter; of a container that is in this tree PL101 tells, of the root PL204.
    """
    after = evidence.after
    if after is None:
        return
    told = {c.class_name for c in evidence.containers if c.evidence == "built"}
    classes = {node.fqn: node.cls for node in after.nodes}
    for replacement in evidence.plan:
        if replacement.original.__name__ in told or "" in replacement.fqns:
            continue
        swallowed = {
            fqn: held
            for fqn in replacement.fqns
            if classes.get(fqn) is replacement.replacement
            and (held := _held_models(evidence, fqn))
            and any(node.num_parameters or node.buffers for node in held)  # no mere activation
            and not _builds_any(evidence, after, fqn)
        }
        if swallowed:
            first, held = next(iter(swallowed.items()))
            yield Finding(
                "PL107",
                "warning",
                replacement.key,
                replacement.original.__name__,
                f"{replacement.replacement.__name__} has none of the modules that "
                f"{replacement.original.__name__} holds: {_by_class(held, first)}. What they do "
                f"is gone in {count(len(swallowed), 'place')}, first at {first!r}. Build them in "
                f"the replacement, or match them instead.",
            )


def several_roles(evidence: Evidence) -> Iterator[Finding]:
    """PL108: one rule, several signatures, roles under one parent, or sub-models.

    Told of rules that match several classes: the places of one class cannot have a rule each, and
    whatever replaces it serves them all, as the class did.
    """
    dropped = {container.class_name for container in evidence.containers}
    for rule in evidence.mapping:
        mine = [r for r in evidence.plan if r.rule is rule]
        leaves = [r for r in mine if r.original.__name__ not in dropped]
        if len(leaves) < 2:
            continue
        said = [*_signatures(leaves), *_roles(leaves), *_towers(evidence, leaves)]
        if said:
            yield Finding(
                "PL108",
                "warning",
                rule.key,
                leaves[0].original.__name__,
                f"key {rule.key!r} puts {rule.replacement.__name__} in different places: "
                f"{'; '.join(said)}. Use a rule for each, unless it is right for all.",
            )


def other_architectures(evidence: Evidence) -> Iterator[Finding]:
    """PL110: the same key, once registered, reaches other models too."""
    own = evidence.architecture_names
    for rule in evidence.mapping:
        if rule.is_exact:
            continue
        fits = fitting_numbers(rule.key, evidence.catalog)
        others = {
            evidence.catalog.model_type(n) for n in fits if evidence.catalog.names[n] not in own
        } - {""}
        if others:
            yield Finding(
                "PL110",
                "info",
                rule.key,
                rule.key,
                f"key {rule.key!r} matches {count(len(fits), 'class', 'classes')} in all, in "
                f"{count(len(others), 'other model type')} too: once registered, it changes "
                f"those models as well. A scope holds for its block alone.",
            )


def _modules_of(evidence: Evidence, key: str, class_name: str) -> list[str]:
    return [
        fqn
        for replacement in evidence.plan
        if replacement.key == key and replacement.original.__name__ == class_name
        for fqn in replacement.fqns
    ]


def _holding(evidence: Evidence, outer: list[str]) -> list[str]:
    """Return those of some matched modules that hold a matched module."""
    matched = evidence.plan.fqns
    return [
        fqn
        for fqn in outer
        if any(other != fqn and (not fqn or other.startswith(fqn + ".")) for other in matched)
    ]


def _held(evidence: Evidence, outer: list[str]) -> list[str]:
    """Return the names of the matched classes inside some matched modules."""
    return sorted(
        {
            replacement.original.__name__
            for fqn, replacement in evidence.plan.fqns.items()
            if any(fqn != f and (not f or fqn.startswith(f + ".")) for f in outer)
        }
    )


def _dropped(evidence: Evidence, outer: list[str]) -> str:
    first = outer[0] if outer else ""
    node = evidence.before.find(first)
    return listed([child.name for child in evidence.before.children(node)], 4) or "what is inside"


def _held_models(evidence: Evidence, fqn: str) -> list[ModuleNode]:
    """Return the nearest modules of a model's own below a module, through lists and the like."""
    found: list[ModuleNode] = []
    waiting = [*evidence.before.children(evidence.before.find(fqn))]
    while waiting:
        node = waiting.pop(0)
        if node.python_module.startswith(_MODELS):
            found.append(node)
        else:
            waiting[:0] = evidence.before.children(node)
    return found


def _builds_any(evidence: Evidence, after: ModuleTree, fqn: str) -> bool:
    """Tell whether a replaced module holds any of what its original held: by place or by class."""
    held = [node for node in _below(evidence.before, fqn) if node.python_module.startswith(_MODELS)]
    places = {node.fqn for node in held}
    replaced = {r.original: r.replacement for r in evidence.plan}
    classes = {node.cls for node in held}
    wanted = (*classes, *(replaced[cls] for cls in classes if cls in replaced))
    return any(node.fqn in places or issubclass(node.cls, wanted) for node in _below(after, fqn))


def _below(tree: ModuleTree, fqn: str) -> tuple[ModuleNode, ...]:
    start = tree.find(fqn)
    end = start.index + 1
    while end < len(tree) and tree.depths[end] > start.depth:
        end += 1
    return tree.nodes[start.index + 1 : end]


def _by_class(nodes: list[ModuleNode], fqn: str) -> str:
    """Write modules below another: "layer.0 and 11 more (BertLayer)"."""
    by_class: dict[str, list[str]] = {}
    for node in nodes:
        by_class.setdefault(node.class_name, []).append(node.fqn.removeprefix(f"{fqn}."))
    shown = [f"{listed(names, 1)} ({name})" for name, names in by_class.items()]
    more = f" and {len(shown) - 4:,} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + more


def _signatures(replacements: list[Replacement]) -> Iterator[str]:
    forms = {r.original.__name__: constructor_parameters(r.original) for r in replacements}
    if len(set(forms.values())) > 1:
        shown = [f"{name}({', '.join(p)})" for name, p in list(forms.items())[:3]]
        yield f"constructors differ, {listed(shown)}"


def _roles(replacements: list[Replacement]) -> Iterator[str]:
    roles: dict[str, dict[str, type]] = {}
    for replacement in replacements:
        for fqn in replacement.fqns:
            parent, _, name = fqn.rpartition(".")
            if not name.isdigit():
                roles.setdefault(parent, {})[name] = replacement.original
    several = [(parent, names) for parent, names in roles.items() if len({*names.values()}) > 1]
    if several:
        parent, names = several[0]
        yield f"{listed(sorted(names))} under one parent, first at {parent or 'the root'!r}"


def _towers(evidence: Evidence, replacements: list[Replacement]) -> Iterator[str]:
    found = Counter(evidence.sub_model_of(fqn) for r in replacements for fqn in r.fqns)
    classes = {evidence.sub_models.get(fqn, "") for fqn in found}
    modules = {
        evidence.before.find(fqn).python_module for fqn in found if fqn in evidence.sub_models
    }
    if len(classes) > 1 and len(modules) > 1:
        shown = [
            f"{count(number, 'module')} in {fqn or 'the root'} ({evidence.sub_models.get(fqn, '')})"
            for fqn, number in found.items()
        ]
        yield f"several sub-models, {listed(shown)}"
