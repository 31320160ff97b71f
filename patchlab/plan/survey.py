"""Surveys: what a mapping would replace in every architecture of the installed transformers.

A key that is written for one model stays registered for the next. The survey answers from the
catalog, importing nothing, which classes each key matches, in which model types, and where it
matches a container as well as what is inside. `filter` narrows it down to a model type or a key.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from patchlab.errors import MappingError, TargetError
from patchlab.mapping.matching import near_names
from patchlab.mapping.rules import PatchMapping, PatchRule, as_part, compile_pattern
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.plan.containers import Container, find_containers, matched_numbers
from patchlab.plan.dead_keys import dead_key_findings
from patchlab.plan.explain import finding_remarks
from patchlab.plan.findings import Finding, has_errors, ordered
from patchlab.plan.readings import are_of_several_kinds, is_abstract
from patchlab.plan.suggest import READABLE, Suggestion, suggest_key
from patchlab.render.frames import frame_of
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table, Tone
from patchlab.render.shown import Shown

# Families for which a narrower key is looked for when the findings are written; each takes some
# 10 ms, and a list of a hundred keys helps nobody. `suggestions` has them all.
_SUGGESTED = 3


class AnyReplacement(nn.Module):
    """Stands for the replacement class where a survey is of keys alone."""


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """One class that one key would replace.

    Attributes:
        key: The key of the rule that decides.
        model_type: The folder under `models`, "bert"; "" for a class of the library itself.
        class_name: Its name.
        python_module: Where it is defined.
        number: Its number in the catalog.
        container: What is inside that a replacement would drop, None if it is no container.
    """

    key: str
    model_type: str
    class_name: str
    python_module: str
    number: int
    container: Container | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Survey(Shown):
    """What a mapping would replace, over every architecture that is installed.

    Attributes:
        mapping: The rules.
        version: Version of transformers.
        rows: One for each class that is matched, by key in order of registration, then model type.
        other_names: Key → names that a pattern fits and that are no modules; transformers' own scan
            replaces such classes too.
        catalog: The classes that were looked at.
        scope: What `filter` left, for the caption; "" for everything.
    """

    mapping: PatchMapping
    version: str
    rows: tuple[SurveyRow, ...]
    other_names: Mapping[str, tuple[str, ...]]
    catalog: Catalog
    scope: str = ""

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Key → number of classes, 0 included, in order of registration."""
        found = Counter(row.key for row in self.rows)
        return {rule.key: found[rule.key] for rule in self.mapping}

    @property
    def containers(self) -> tuple[Container, ...]:
        """The matched classes that hold matched classes, in the order of the rows."""
        return tuple(row.container for row in self.rows if row.container is not None)

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model types in which a class is matched, sorted; "" left out."""
        return tuple(sorted({row.model_type for row in self.rows} - {""}))

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """One for each cause: containers (PL101), no modules (PL103), dead keys (PL104, PL105)."""
        return ordered([*_container_findings(self), *_other_findings(self), *_dead_findings(self)])

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_errors(self.findings)

    def filter(
        self,
        *,
        model_type: str | None = None,
        key: str | None = None,
        containers_only: bool = False,
    ) -> Survey:
        """Return the part of the survey that is asked for.

        Args:
            model_type: A folder under `models`, or a config's `model_type`. Kept are its own
                classes and those of others that they can hold: "llava" keeps LlamaAttention.
            key: One of the keys.
            containers_only: Whether to keep only containers.

        Raises:
            TargetError: A model type that transformers does not have.
            MappingError: A key that is not in the mapping.
        """
        if key is not None and key not in self.counts:
            raise MappingError(
                f"key {key!r} is not in this survey; its keys are "
                f"{', '.join(map(repr, self.counts))}. Ask for one of them."
            )
        kept = None if model_type is None else self._classes_of(model_type)
        rows = tuple(
            row
            for row in self.rows
            if (kept is None or row.number in kept)
            and (key is None or row.key == key)
            and (not containers_only or row.container is not None)
        )
        rules = tuple(rule for rule in self.mapping if key is None or rule.key == key)
        parts = [model_type, repr(key) if key else None, "containers" if containers_only else None]
        scope = ", ".join([part for part in [self.scope, *parts] if part])
        others = {k: names for k, names in self.other_names.items() if key is None or k == key}
        return Survey(PatchMapping(rules), self.version, rows, others, self.catalog, scope)

    def _classes_of(self, model_type: str) -> frozenset[int]:
        known = self.catalog
        if model_type in known.model_types:
            return known.model_type_classes(model_type)
        config = known.config_names.get(model_type, "")
        if config in known.configs:
            return known.architecture(config) | frozenset(known.configs[config].models)
        near = near_names(model_type, [*known.model_types, *known.config_names])
        raise TargetError(
            f"transformers {known.version} has no model type {model_type!r}. "
            f"{f'Did you mean {near[0]!r}?' if near else 'Survey.model_types lists those matched.'}"
        )

    def suggestions(self, key: str) -> dict[str, Suggestion]:
        """Return model type → the narrower key, where a key matches a container."""
        containers: dict[str, list[str]] = {}
        for row in self.rows:
            if row.key == key and row.container is not None:
                containers.setdefault(row.model_type, []).append(row.class_name)
        # From the catalog and not from the rows, of which `filter` may have left the containers.
        names: dict[str, list[str]] = {}
        for number, rule in matched_numbers(self.mapping, self.catalog).items():
            if rule.key == key and not is_abstract(self.catalog.names[number]):
                owner = self.catalog.model_type(number)
                names.setdefault(owner, []).append(self.catalog.names[number])
        suggested = {
            model_type: suggest_key(key, names.get(model_type, ()), held, self.catalog)
            for model_type, held in containers.items()
        }
        return {model_type: found for model_type, found in suggested.items() if found is not None}

    def to_table(self, *, limit: int = 20) -> Table:
        """Return a summary: a row for each model type, those with containers first.

        Args:
            limit: Model types in all, shared among the keys, at least three each; what is left out
                is counted in a row of its own.
        """
        rows: list[Row] = []
        limit = max(3, limit // max(1, sum(map(bool, self.counts.values()))))
        for key, number in self.counts.items():
            rows += _key_rows(key, [row for row in self.rows if row.key == key], number, limit)
        return Table(
            columns=(
                Column("Key and model type", mono=True),
                Column("Classes", align="right"),
                Column("Containers", align="right"),
                Column("Matched", mono=True),
            ),
            rows=tuple(rows),
            caption=self._caption(),
            caption_tone="plain" if self.ok else "error",
            footer=finding_remarks(self.findings),
        )

    def to_frame(self) -> Any:
        """Return a pandas frame with a line for each class that is matched."""
        held = [row.container for row in self.rows]
        return frame_of(
            {
                "key": [row.key for row in self.rows],
                "model_type": [row.model_type for row in self.rows],
                "class_name": [row.class_name for row in self.rows],
                "python_module": [row.python_module for row in self.rows],
                "is_container": [found is not None for found in held],
                "inner": [", ".join(found.inner) if found is not None else "" for found in held],
                "path": [found.path if found is not None else "" for found in held],
            }
        )

    def _caption(self) -> str:
        where = f"transformers {self.version}" + (f", {self.scope}" if self.scope else "")
        rules = count(len(self.mapping), "key")
        classes = count(len(self.rows), "class", "classes")
        types = count(len(self.model_types), "model type")
        containers = count(len(self.containers), "container")
        return f"{where}: {rules} · {classes} in {types} · {containers}"


def survey(mapping: Any, *, progress: bool = True) -> Survey:
    """Say what a mapping would replace in every architecture of the installed transformers.

    Nothing is imported and nothing built. The first survey of an installation reads its source,
    which takes some seconds; later ones take some 0.1 s.

    Args:
        mapping: A dict from key to replacement class, a `PatchMapping`, one key, or several keys.
        progress: Whether to show a bar on standard error while the source is read.

    Raises:
        MappingError: A key that can never match, or (`MappingTypeError`) no mapping.
        CatalogError: The installed transformers could not be read.
    """
    rules = _mapping_of(mapping)
    known = load_catalog(progress=progress)
    containers = {found.full_name: found for found in find_containers(rules, known)}
    order = {rule.key: place for place, rule in enumerate(rules)}
    rows = []
    for number, rule in matched_numbers(rules, known).items():
        python_module, name = known.python_module(number), known.names[number]
        held = containers.get(f"{python_module}.{name}")
        rows.append(
            SurveyRow(rule.key, known.model_type(number), name, python_module, number, held)
        )
    rows.sort(key=lambda row: (order[row.key], row.model_type, row.python_module, row.class_name))
    others = {rule.key: _others(rule, known) for rule in rules if not rule.is_exact}
    return Survey(rules, known.version, tuple(rows), others, known)


def _mapping_of(mapping: Any) -> PatchMapping:
    if isinstance(mapping, str):
        mapping = [mapping]
    if isinstance(mapping, (list, tuple)) and all(isinstance(key, str) for key in mapping):
        mapping = dict.fromkeys(mapping, AnyReplacement)
    return PatchMapping.of(mapping)


def _others(rule: PatchRule, catalog: Catalog) -> tuple[str, ...]:
    search = compile_pattern(rule.key).search
    return tuple(name for name in catalog.other_names if search(name))


def _key_rows(key: str, rows: list[SurveyRow], number: int, limit: int) -> list[Row]:
    by_type: dict[str, list[SurveyRow]] = {}
    for row in rows:
        by_type.setdefault(row.model_type, []).append(row)
    containers = sum(row.container is not None for row in rows)
    tone: Tone = "error" if containers else "match" if rows else "warning"
    shown = [Row(0, key, (f"{number:,}", f"{containers:,}", ""), tone, mark="●" if rows else "✕")]
    lines = sorted(by_type.items(), key=lambda item: (-_num_containers(item[1]), item[0]))
    for model_type, found in lines[:limit]:
        held = [row.container for row in found if row.container is not None]
        if held:
            text = f"{held[0].class_name} ⊃ {held[0].path}: {held[0].example}"
            title = "\n".join(f"{c.class_name} holds {', '.join(c.inner)}" for c in held)
        else:
            text = _listed([row.class_name for row in found])
            title = ", ".join(row.class_name for row in found)
        shown.append(
            Row(
                1,
                model_type or "(the library itself)",
                (f"{len(found):,}", f"{len(held):,}", text),
                "error" if held else "plain",
                mark="✕" if held else "",
                title=title,
            )
        )
    if len(lines) > limit:
        left = [row for _, found in lines[limit:] for row in found]
        held_left = sum(row.container is not None for row in left)
        label = f"… {count(len(lines) - limit, 'more model type')}"
        shown.append(Row(1, label, (f"{len(left):,}", f"{held_left:,}", ""), "dim"))
    return shown


def _num_containers(rows: Iterable[SurveyRow]) -> int:
    return sum(row.container is not None for row in rows)


def _container_findings(found: Survey) -> Iterable[Finding]:
    for key in found.counts:
        rows = [row for row in found.rows if row.key == key]
        held = [row for row in rows if row.container is not None]
        if not held:
            continue
        first = held[0].container
        assert first is not None
        types = sorted({row.model_type for row in held})
        message = (
            f"key {key!r} matches {count(len(rows), 'class', 'classes')}, of which "
            f"{_listed([row.class_name for row in held])} "
            f"{'is a container' if len(held) == 1 else 'are containers'}: {first.class_name} holds "
            f"{first.example} at {first.path}, which goes with it."
        )
        suggestion = ""
        if len(types) <= _SUGGESTED:
            keys = found.suggestions(key)
            advice = [f"for {m or 'the library'} {_use(key, s)}" for m, s in keys.items()]
            if advice:
                message += f" To replace what is inside only, {'; '.join(advice)}."
            if len(types) == len(keys) == 1:
                suggestion = next(iter(keys.values())).key
        else:
            named = next(model_type for model_type in types if model_type)
            message += (
                f" That is so in {count(len(types), 'model type')}, and no short key fits them "
                f"all. Write one for the model at hand: filter(model_type={named!r}) has it."
            )
        yield Finding("PL101", "error", key, first.class_name, message, suggestion)


def _use(key: str, suggestion: Suggestion) -> str:
    if len(suggestion.key) <= READABLE or not are_of_several_kinds(suggestion.keeps, key):
        return f"use {suggestion.key!r}"
    return f"name the classes you mean, of {_listed(suggestion.keeps, 6)}"


def _other_findings(found: Survey) -> Iterable[Finding]:
    if found.scope:
        return  # they belong to no model type
    for key, names in found.other_names.items():
        if not names:
            continue
        left_out = sum(re.search(f"(?:{as_part(key)})$", name) is None for name in names)
        advice = ""
        if not key.endswith("$") and left_out:
            advice = f" With a '$' at its end the key leaves {left_out} of them out."
        yield Finding(
            "PL103",
            "warning",
            key,
            names[0],
            f"key {key!r} also fits {count(len(names), 'class', 'classes')} of transformers that "
            f"{'is no module' if len(names) == 1 else 'are no modules'}: {_listed(names)}. "
            f"transformers' own scan replaces those that are loaded, too; patchlab leaves them "
            f"alone.{advice}",
        )


def _dead_findings(found: Survey) -> Iterable[Finding]:
    if found.scope or all(found.counts.values()):
        return ()
    names = set(found.catalog.names)
    return dead_key_findings(
        found.mapping, found.counts, names, catalog=found.catalog, several_models=True
    )


def _listed(names: Iterable[str], limit: int = 3) -> str:
    unique = list(dict.fromkeys(names))
    if len(unique) > limit:
        return f"{', '.join(unique[:limit])} and {len(unique) - limit:,} more"
    return ", ".join(unique)
