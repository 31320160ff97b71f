"""Readings: what somebody may have meant by a key that matches containers and what is in them.

Not both can be replaced. What lies innermost is one reading, and what a finding suggests: the
classes of the model at hand that are no containers, in a key that matches nothing new. Where the
key ends in a word that the containers end in and what they hold does not, as ".*Encoder" fits an
encoder and its EncoderLayers, the other reading is the same key with a "$".

Names tell what looks alike: two classes are of one kind if the same word ends both. A key for
classes of several kinds is right for a tree and still nothing that one replacement could be for;
then the classes are listed for the reader to choose from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from patchlab.model.catalog import full_names
from patchlab.plan.containers import Container, find_containers
from patchlab.plan.evidence import Evidence
from patchlab.plan.suggest import READABLE, Suggestion, suggest_key, words
from patchlab.plan.wording import listed

_LISTED = 6


@dataclass(frozen=True, slots=True)
class Readings:
    """What a key may have meant in one target.

    Attributes:
        inner: The key for what lies innermost, None if there is none.
        whole: The key for what ends in the key's last word, "" where that is no other reading.
        names: The matched classes of the tree that hold no matched class there, sorted.
        several: Whether those are of several kinds, not all of which the key names.
    """

    inner: Suggestion | None
    whole: str = ""
    names: tuple[str, ...] = ()
    several: bool = False

    @property
    def key(self) -> str:
        """The key to use in place of the one at hand, "" if there is none."""
        return self.inner.key if self.inner is not None else ""

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two; "" where no key can be named."""
        if self.inner is None:
            return ""
        if not self.several and (len(self.key) <= 2 * READABLE or len(self.names) == 1):
            if not self.whole:
                return f"Use {self.key!r}."
            return f"Use {self.key!r} for the inner modules, or {self.whole!r} for the outer ones."
        # A key that needs reading twice helps less than the names that it would be made of.
        said = (
            f"Without the containers the key fits classes{' of several kinds' * self.several}. "
            f"Name the ones you mean: {listed(self.names, _LISTED)}"
        )
        short = len(self.key) <= READABLE and self.inner.form != "exclusion"
        if short and self.names == self.inner.built:
            said += f" (all of them: {self.key!r})"
        return f"{said}." + (f" For the outer modules use {self.whole!r}." if self.whole else "")


def readings_of(evidence: Evidence, key: str, *, also_drop: Iterable[str] = ()) -> Readings:
    """Return what a key may have meant in a target; an exact name means itself.

    Args:
        evidence: The target under the mapping; nothing of the patched skeleton is read.
        key: The key of one of its rules.
        also_drop: Names of matched classes to take for containers.
    """
    rule = next(rule for rule in evidence.mapping if rule.key == key)
    if rule.is_exact:
        return Readings(None)
    counts = _built_counts(evidence, key)
    matched = {
        name
        for name in evidence.architecture_names
        if rule.matches(name) and (name in counts or not is_abstract(name))
    }
    containers = [c for c in evidence.containers if c.key == key]
    drops = {*also_drop, *_dropped(evidence, key, matched, counts, containers)}
    whole, outside = _whole_reading(evidence, key, counts, containers)
    inner = {name for name in counts if name not in drops and name not in outside}
    if sum(counts[name] for name in outside) >= sum(counts[name] for name in inner):
        outside = set()
    drops |= outside
    leaves = set(counts) - drops
    if leaves:
        matched = {n for n in matched if n in drops or n in leaves or _is_like(n, leaves)}
    found = suggest_key(key, matched, drops, evidence.catalog, built_classes=counts)
    if found is None:
        return Readings(None)
    static = {c.class_name for c in containers if c.evidence == "static"} - {*also_drop}
    names = tuple(sorted(set(counts) - (drops - static))) or found.keeps
    return Readings(found, whole, names, are_of_several_kinds(names, key))


def kind_of(class_name: str) -> str:
    """Return the word that tells what a class is: the last, without a plural or a number.

    Example:
        >>> kind_of("BertSelfAttention"), kind_of("Llama4VisionMLP2"), kind_of("BrosTextEmbeddings")
        ('Attention', 'MLP', 'Embedding')
    """
    parts = [word for word in words(class_name) if len(word) > 2 and word[0].isalpha()]
    return parts[-1].removesuffix("s") if parts else class_name


def are_of_several_kinds(names: Iterable[str], key: str) -> bool:
    """Tell whether classes are of several kinds, not all of which their key names."""
    kinds = {kind_of(name) for name in names}
    return len(kinds) > 1 and any(kind not in key for kind in kinds)


def is_abstract(class_name: str) -> bool:
    """Tell whether a class is one that each model type has for its models to inherit from."""
    return class_name.endswith("PreTrainedModel")


def _last_kind(key: str) -> str:
    """Return the kind of class that a key ends in, "" if it ends in no word."""
    word = re.search(r"([A-Za-z]{3,}?)s?\??\$?$", key)
    return kind_of(word[1]) if word else ""


def _built_counts(evidence: Evidence, key: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for replacement in evidence.plan:
        if replacement.key == key:
            name = replacement.original.__name__
            counts[name] = counts.get(name, 0) + len(replacement.fqns)
    return counts


def _dropped(
    evidence: Evidence,
    key: str,
    matched: set[str],
    counts: dict[str, int],
    containers: list[Container],
) -> set[str]:
    """Return the matched classes that hold others, here or under another config."""
    drops = {c.class_name for c in containers} | evidence.architecture_containers
    if not _last_kind(key):  # a key such as "Dac.*" is not about whole models
        drops |= _heads(evidence, matched - set(counts))
        root = evidence.before.root.class_name
        drops |= {root} if root in counts and kind_of(root) not in key else set()
    harmless = [c for c in containers if _holds_nothing_here(c, counts)]
    if harmless and not set(counts) - drops:
        # All that this model has of the key can hold more under another config: keep it.
        drops -= {c.class_name for c in harmless}
        drops |= {name for c in harmless for name in c.inner}
    return drops


def _heads(evidence: Evidence, names: set[str]) -> set[str]:
    """Return those of some names that are whole models around what the key matches."""
    catalog = evidence.catalog
    numbers = [c.number for name in names for c in catalog.named(name)]
    found = find_containers(evidence.mapping, catalog, scope=full_names(catalog, numbers))
    return {container.class_name for container in found}


def _is_like(class_name: str, leaves: set[str]) -> bool:
    """Tell whether a class of another config would be meant along with those of the tree."""
    kind = kind_of(class_name)
    return any(kind_of(leaf) == kind or class_name.startswith(leaf) for leaf in leaves)


def _holds_nothing_here(container: Container, counts: dict[str, int]) -> bool:
    return container.evidence == "static" and not set(container.inner) & set(counts)


def _whole_reading(
    evidence: Evidence, key: str, counts: dict[str, int], containers: list[Container]
) -> tuple[str, set[str]]:
    """Return the key that means the containers, and the names outside them that it means too."""
    branches = _branches(key)
    kinds = {kind for branch in branches for kind in _last_kinds(branch)}
    built = {c.class_name for c in containers if c.evidence == "built"}
    held = {name for c in containers for name in c.inner if name in counts} - built
    if "" in kinds or not built or not held or all(b.endswith("$") for b in branches):
        return "", set()
    of_kind = {name for name in counts if kind_of(name) in kinds}
    if built.isdisjoint(of_kind) or held & of_kind:
        return "", set()
    anchored = [branch.removesuffix("$") + "$" for branch in branches]
    whole = "|".join(b for b in anchored if any(map(re.compile(b).search, counts)))
    flat = bool(whole) and _is_flat(evidence, key, whole)
    return (whole if flat else ""), of_kind - built - held


def _branches(key: str) -> list[str]:
    """Return the alternatives that a key puts side by side; the key, if it is not as simple."""
    return [key] if re.search(r"[(\[\\]", key) else key.split("|")


def _last_kinds(key: str) -> set[str]:
    """Return the kinds of class that a key without alternatives, or but at its end, ends in."""
    group = re.search(r"\((?:\?:)?([A-Za-z|]+)\)\$?$", key)
    return {_last_kind(word) for word in group[1].split("|")} if group else {_last_kind(key)}


def _is_flat(evidence: Evidence, key: str, narrower: str) -> bool:
    """Tell whether what a narrower key replaces in the tree holds nothing that it replaces."""
    search = re.compile(narrower).search
    fqns = {
        fqn
        for replacement in evidence.plan
        if replacement.key == key and search(replacement.original.__name__)
        for fqn in replacement.fqns
    }
    above = (fqn[:at] for fqn in fqns for at, letter in enumerate(fqn) if letter == ".")
    return bool(fqns) and "" not in fqns and not any(prefix in fqns for prefix in above)
