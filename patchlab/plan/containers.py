"""Containers: matched classes that hold other matched classes, which a replacement would drop.

A container is told from two sources that see different things. A built tree shows what this model
holds, through whatever was passed in or put there later. The catalog shows what a class can hold
under any config: a model built with default flags has no `BertCrossAttention`, and the next one
has. Of 10,984 inner modules predicted to vanish from 790 architectures of transformers 5.24.0,
10,984 did.

Nothing here decides how bad that is, or says it; see `overmatch` and `survey`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from patchlab.mapping.rules import PatchMapping, PatchRule, compile_pattern, is_exact_name
from patchlab.model.catalog import Catalog
from patchlab.model.containment import as_mask

Seen = Literal["built", "static"]


@dataclass(frozen=True, slots=True)
class ObservedPair:
    """A module of one class seen inside a module of another, at any depth.

    Attributes:
        outer: Full name of the class that holds ("python_module.ClassName").
        inner: Full name of the class that is held.
        path: From the one to the other, as in an FQN; one example.
    """

    outer: str
    inner: str
    path: str


@dataclass(frozen=True, slots=True)
class Container:
    """A matched class that holds matched classes.

    Attributes:
        class_name: Its name.
        python_module: Where it is defined.
        key: The key that decides it.
        inner: Names of the matched classes inside, sorted; what the replacement would drop.
        example: One of them, the nearest.
        path: From the container to the example; a part that is not known is "*".
        evidence: "built" if seen in the tree, "static" if only the source says so.
    """

    class_name: str
    python_module: str
    key: str
    inner: tuple[str, ...]
    example: str
    path: str
    evidence: Seen

    @property
    def full_name(self) -> str:
        """Python module and name, joined by a dot."""
        return f"{self.python_module}.{self.class_name}"


def observed_pairs(
    modules: Iterable[tuple[str, str]], mapping: PatchMapping
) -> tuple[ObservedPair, ...]:
    """Collect which matched classes a tree holds inside which, one example for each pair.

    Args:
        modules: `(FQN, full name of the class)` in preorder, as `named_modules()` gives them.
        mapping: The rules; classes that none of them fits are passed over.
    """
    found: dict[tuple[str, str], str] = {}
    above: list[tuple[str, str]] = []  # matched modules that hold the present one, outermost first
    for fqn, full_name in modules:
        while above and not _lies_below(fqn, above[-1][0]):
            above.pop()
        if mapping.find(full_name.rpartition(".")[2]) is None:
            continue
        for outer_fqn, outer in above:
            if outer != full_name and (outer, full_name) not in found:
                found[outer, full_name] = fqn[len(outer_fqn) + 1 :] if outer_fqn else fqn
        above.append((fqn, full_name))
    return tuple(ObservedPair(outer, inner, path) for (outer, inner), path in found.items())


def _lies_below(fqn: str, outer: str) -> bool:
    return not outer or fqn.startswith(outer + ".")


def matched_numbers(mapping: PatchMapping, catalog: Catalog) -> dict[int, PatchRule]:
    """Return the classes of the catalog that the rules decide, by number, with the rule of each.

    A class that a rule would replace by itself is left out, as the engine leaves it alone.
    """
    deciding: dict[int, PatchRule] = {}
    # What decides comes first: an exact name before any pattern, and of two patterns the first.
    for rule in sorted(mapping, key=lambda rule: not rule.is_exact):
        for number in fitting_numbers(rule.key, catalog):
            deciding.setdefault(number, rule)
    return {
        number: deciding[number]
        for number in sorted(deciding)
        if not _is_itself(deciding[number], catalog.names[number], catalog, number)
    }


@functools.lru_cache(maxsize=256)
def fitting_numbers(key: str, catalog: Catalog) -> tuple[int, ...]:
    """Return the classes of the catalog that a key fits, by number, whichever rule decides.

    Remembered: one preview asks several times, and a form at each letter that is typed or taken
    back.
    """
    if is_exact_name(key):
        return tuple(c.number for c in catalog.named(key))
    search = compile_pattern(key).search
    return tuple(number for number, name in enumerate(catalog.names) if search(name))


def _is_itself(rule: PatchRule, name: str, catalog: Catalog, number: int) -> bool:
    replacement = rule.replacement
    return replacement.__name__ == name and replacement.__module__ == catalog.python_module(number)


def find_containers(
    mapping: PatchMapping,
    catalog: Catalog,
    *,
    scope: Iterable[str] | None = None,
    observed: Sequence[ObservedPair] = (),
) -> tuple[Container, ...]:
    """Find the matched classes that hold matched classes, sorted by full name.

    What is inside counts when the same rule replaces it, or when it would be dropped with the
    container: another rule decides it, and the container's replacement is no subclass of the
    container, so that nothing builds it any more.

    Args:
        mapping: The rules.
        catalog: The classes of the installed transformers.
        scope: Full names of the classes that may be containers, such as those of a tree; every
            class of the catalog if None. A class inside a container need not be in the scope: the
            catalog knows of classes that another config brings in.
        observed: What a built tree showed, from `observed_pairs`.
    """
    matched = matched_numbers(mapping, catalog)
    by_rule: dict[str, int] = {}
    for rule in mapping:
        by_rule[rule.key] = as_mask(n for n, decides in matched.items() if decides is rule)
    everything = as_mask(matched)
    seen: dict[str, list[ObservedPair]] = {}
    for pair in observed:
        seen.setdefault(pair.outer, []).append(pair)
    wanted = None if scope is None else set(scope)
    short = None if wanted is None else {name.rpartition(".")[2] for name in wanted}
    found: dict[str, Container] = {}
    for number, rule in matched.items():
        if short is not None and catalog.names[number] not in short:
            continue
        full_name = f"{catalog.python_module(number)}.{catalog.names[number]}"
        if wanted is not None and full_name not in wanted:
            continue
        keeps_others = _inherits_from(rule, full_name)
        mask = by_rule[rule.key] if keeps_others else everything
        inner = catalog.containment.inner(number, mask)
        pairs = [p for p in seen.pop(full_name, ()) if _counts(p, rule, mapping, keeps_others)]
        if not inner and not pairs:
            continue
        found[full_name] = _container(full_name, number, rule, inner, pairs, catalog)
    # Classes that the catalog does not know, such as remote code that is patched on request.
    for full_name, pairs in seen.items():
        decides = mapping.find(full_name.rpartition(".")[2])
        if decides is None or (wanted is not None and full_name not in wanted):
            continue
        pairs = [
            p for p in pairs if _counts(p, decides, mapping, _inherits_from(decides, full_name))
        ]
        if pairs:
            found[full_name] = _container(full_name, -1, decides, (), pairs, catalog)
    return tuple(found[name] for name in sorted(found))


def _counts(pair: ObservedPair, rule: PatchRule, mapping: PatchMapping, keeps_others: bool) -> bool:
    inner = mapping.find(pair.inner.rpartition(".")[2])
    return inner is not None and (inner is rule or not keeps_others)


def _inherits_from(rule: PatchRule, full_name: str) -> bool:
    bases = rule.replacement.__mro__
    return any(f"{base.__module__}.{base.__qualname__}" == full_name for base in bases)


def _container(
    full_name: str,
    number: int,
    rule: PatchRule,
    inner: tuple[int, ...],
    pairs: Sequence[ObservedPair],
    catalog: Catalog,
) -> Container:
    names = {catalog.names[n] for n in inner} | {p.inner.rpartition(".")[2] for p in pairs}
    if pairs:
        nearest = min(pairs, key=lambda p: (p.path.count("."), p.path))
        path, example = nearest.path, nearest.inner.rpartition(".")[2]
    else:
        path, reached = catalog.containment.path_to(number, as_mask(inner))
        example = catalog.names[reached]
    python_module, _, class_name = full_name.rpartition(".")
    return Container(
        class_name=class_name,
        python_module=python_module,
        key=rule.key,
        inner=tuple(sorted(names)),
        example=example,
        path=path,
        evidence="built" if pairs else "static",
    )
