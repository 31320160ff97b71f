"""What `%%patched` says after a cell: a line for each model, one for each finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patchlab.plan.explain import finding_lines

if TYPE_CHECKING:
    from patchlab.apply.report import ModelReport, PatchReport
    from patchlab.apply.swap import Swap

NO_RULES = (
    "no rule is in force: the line has none, and nothing was registered when the cell began. Write "
    "%%patched key=Class, or %patches register key=Class before."
)


def report_lines(report: PatchReport, namespace: Mapping[str, Any]) -> list[str]:
    """Say what a scope did: `model: 12 × BertSelfAttention → MyAttention · restored`.

    A model goes by the variable of the user's namespace that holds it, else by its class. Equal
    lines, as from a loop, are one with a count.
    """
    restored = "restored" if report.restored else "NOT restored, see patchlab.status()"
    models = Counter(model_line(model, namespace) for model in report.models)
    lines = [
        f"{line} · {restored}" + (f" · {count} such models" if count > 1 else "")
        for line, count in models.items()
    ]
    if not lines:
        lines = [f"no model was built in this cell · {restored}"]
    if not report.counts:
        lines.append(NO_RULES)
    return [*lines, *finding_lines(report.findings, severity=True)]


def swap_lines(name: str, swap: Swap) -> list[str]:
    """Say what was swapped in the model of a variable for the length of a cell."""
    said = ", ".join(replacement.summary for replacement in swap.replacements)
    undone = "undone" if swap.undone else "NOT undone"
    lines = [f"{name}: {said or 'nothing replaced'} · {undone}"]
    if not swap.counts:
        lines.append(NO_RULES)
    return [*lines, *finding_lines(swap.findings, severity=True)]


def model_line(model: ModelReport, namespace: Mapping[str, Any]) -> str:
    """Say what was replaced in one model."""
    return f"{model_name(model, namespace)}: {model.summary}"


def model_name(model: ModelReport, namespace: Mapping[str, Any]) -> str:
    """Return the variable that holds a model, its class name where none does."""
    found = model.model
    if found is not None:
        for name, value in list(namespace.items()):
            if value is found and not name.startswith("_"):
                return name
    return model.class_name
