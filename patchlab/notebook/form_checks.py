"""What the form has to say about a key and a class, worked out as values and without widgets.

A check says it in two steps, so that what is quick is shown while one types: what the key matches,
here and in every architecture; then, for a model and a class, what the preview finds. Everything is
text by then: nothing here is evaluated, and names are looked up in the user's namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from IPython.core.error import UsageError
from torch import nn

from patchlab.errors import MappingError, PatchlabError
from patchlab.mapping.rules import PatchMapping, PatchRule, check_key
from patchlab.model.catalog import load_catalog
from patchlab.model.classes import loaded_module_classes
from patchlab.model.skeleton import skeleton, without_scopes
from patchlab.model.tree import ModuleTree, module_tree
from patchlab.notebook.form_style import FITS
from patchlab.notebook.magic_line import module_classes, resolve_name
from patchlab.notebook.tree_marks import TreeMarks, marks_of, preview_marks
from patchlab.plan import overmatch
from patchlab.plan.analyses import dead_keys
from patchlab.plan.containers import matched_numbers
from patchlab.plan.evidence import Evidence
from patchlab.plan.findings import Finding, ordered
from patchlab.plan.survey import AnyReplacement, Survey, survey
from patchlab.plan.wording import constructor_parameters
from patchlab.render.numbers import count
from patchlab.verify.preview import Preview, plan_for, preview

SEPARATOR = " · "
_MOST_TYPES = 3  # Some 10 ms each; a person works on one or two architectures at a time.
# What can be said of a key alone; the others judge the replacement class.
_OF_KEYS = (
    overmatch.containers,
    overmatch.searched_names,
    overmatch.other_names,
    dead_keys,
    overmatch.sub_models,
    overmatch.swallowed_modules,
    overmatch.other_architectures,
)


@dataclass(frozen=True, eq=False)
class Target:
    """What the laboratory looks at.

    Attributes:
        value: As it was given: a model, a config, a folder or a model id.
        model: The model, or the skeleton of what is none.
        tree: Its tree.
    """

    value: Any
    model: nn.Module
    tree: ModuleTree

    @classmethod
    def of(cls, value: Any) -> Target:
        """Read a target.

        Raises:
            TargetError: It is none of the above.
        """
        is_model = isinstance(value, nn.Module)
        model = value if is_model else without_scopes(skeleton, value)
        return cls(value, model, module_tree(model))


@dataclass(frozen=True)
class Question:
    """What is in the form, at one moment."""

    key: str
    class_name: str
    registered: Mapping[str, type[nn.Module]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Answer:
    """What there is to say about it.

    Attributes:
        problem: Why the key can never match.
        matches: What the key matches, counted, in a line.
        here: The number of modules of the target that the key decides.
        class_problem: Why the class cannot be a replacement.
        class_note: Where the class is from and what it is built with.
        findings: Of the key, or of the preview; of other keys, only errors while one is typed.
        marks: What to mark in the tree.
        preview: What all rules together would do to the target.
        whole: Whether this is all, and nothing more is to come.
    """

    question: Question
    problem: str = ""
    matches: str = ""
    here: int = 0
    class_problem: str = ""
    class_note: str = ""
    findings: tuple[Finding, ...] = ()
    marks: TreeMarks = field(default_factory=TreeMarks)
    preview: Preview | None = None
    whole: bool = True


def answer(
    question: Question,
    namespace: Mapping[str, Any],
    target: Target | None,
    tell: Callable[[Answer], None],
) -> None:
    """Look into what is in the form, and tell first what is quick and then the whole."""
    told = Answer(question)
    replacement: type[nn.Module] | None = None
    if question.class_name:
        try:
            replacement = find_class(question.class_name, namespace)
            told = replace(told, class_note=_class_note(question.class_name, replacement))
        except PatchlabError as error:
            told = replace(told, class_problem=str(error))
    if question.key:
        try:
            told = _key_answer(told, target)
        except MappingError as error:
            told = replace(told, problem=str(error))
    rules = dict(question.registered)
    if question.key and not told.problem and replacement is not None:
        rules[question.key] = replacement
    if target is None or not rules or (question.key and replacement is None):
        tell(told)
        return
    tell(replace(told, whole=False))
    load_catalog(progress=False)  # The preview would show a bar, from this thread.
    shown = preview(target.value, rules)
    findings = shown.findings
    if question.key:
        # What is registered was judged when it was; its errors are errors of this model too.
        findings = tuple(
            f for f in findings if f.key in ("", question.key) or f.severity == "error"
        )
    tell(replace(told, preview=shown, findings=findings, marks=preview_marks(shown)))


def find_class(name: str, namespace: Mapping[str, Any]) -> type[nn.Module]:
    """Look up the class that a form names, such as "MyMLP", "layers.MyMLP" or "MyMLP · __main__".

    Raises:
        MappingError: No name, or nothing of that name.
        MappingTypeError: It is no module class.
    """
    plain = class_part(name)
    if not plain:
        known = ", ".join(module_classes(namespace)[:5])
        raise MappingError(
            f"no replacement class is chosen. {f'Choose one, such as {known}.' if known else ''}"
            f"{'' if known else 'Run the cell that defines one, then choose it here.'}"
        )
    try:
        found = resolve_name(plain, namespace)
    except UsageError as error:
        raise MappingError(f"replacement {plain!r}: {error}") from error
    return PatchRule("AnyName", found).replacement


def class_part(name: str) -> str:
    """Return the name of a class without the Python module that is shown behind it."""
    return name.partition(SEPARATOR)[0].strip()


def class_options(namespace: Mapping[str, Any]) -> dict[str, type[nn.Module]]:
    """Return what can be chosen: name with Python module → class; the notebook's own come first."""
    found = {name: namespace[name] for name in module_classes(namespace)}
    own = sorted(found, key=lambda name: (found[name].__module__ != "__main__", name))
    return {f"{name}{SEPARATOR}{found[name].__module__}": found[name] for name in own}


def _key_answer(told: Answer, target: Target | None) -> Answer:
    key = check_key(told.question.key)
    rule = PatchRule(key, AnyReplacement)
    alone = PatchMapping((rule,))
    parts = ["exact name" if rule.is_exact else "pattern"]
    loaded = [cls for cls in loaded_module_classes() if rule.matches(cls.__name__)]
    parts.append(f"{count(len(loaded), 'class', 'classes')} loaded")
    here = 0 if target is None else plan_for(target.tree, alone).counts[key]
    if target is not None:
        parts.append(f"{count(here, 'module')} here")
    catalog = load_catalog(progress=False)
    numbers = matched_numbers(alone, catalog)
    types = {catalog.model_type(number) for number in numbers} - {""}
    parts.append(f"{count(len(numbers), 'class', 'classes')} in {count(len(types), 'model type')}")
    told = replace(told, matches=SEPARATOR.join(parts), here=here)
    if target is None:
        return replace(told, findings=_survey_findings(survey(alone, progress=False), loaded))
    rules = PatchMapping.of({**told.question.registered, key: AnyReplacement})
    plan = plan_for(target.tree, rules)
    evidence = Evidence(rules, plan, target.model, target.tree, None, None, catalog)
    judged = ordered(f for analysis in _OF_KEYS for f in analysis(evidence) if f.key == key)
    marks = marks_of(plan, target.tree, judged, key=key)
    how = "exact name" if rule.is_exact else "pattern"
    reasons = {
        fqn: f"{key!r} ({how}) decides this class."
        if fqn in plan.fqns and plan.fqns[fqn].key == key
        else reason
        for fqn, reason in marks.reasons.items()
    }
    return replace(told, findings=judged, marks=TreeMarks(marks.marks, reasons))


def _survey_findings(found: Survey, loaded: list[type]) -> tuple[Finding, ...]:
    """Return the findings over all architectures, those of the loaded ones with a narrower key.

    No short key fits a hundred architectures; one that fits the model at hand is what is needed.
    """
    folders = {cls.__module__.split(".")[2] for cls in loaded if cls.__module__.count(".") > 2}
    types = sorted(folders.intersection(found.model_types))[:_MOST_TYPES]
    narrower = [
        finding
        for model_type in types
        for finding in found.filter(model_type=model_type).findings
        if finding.code == "PL101" and finding.suggestion
    ]
    return tuple(dict.fromkeys([*narrower, *found.findings]))


def _class_note(name: str, cls: type[nn.Module]) -> str:
    is_told = SEPARATOR in name and len(name) <= FITS
    place = "" if is_told else f"{cls.__module__}{SEPARATOR}"
    return f"{place}built with ({', '.join(constructor_parameters(cls))})"
