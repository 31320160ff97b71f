"""Findings: what an analysis has to say, in one shape, with codes that stay.

Each analysis returns `Finding`s and decides nothing else; whoever shows, warns or refuses reads
them from here. A code keeps its meaning for good. A message says what was found and where, counted,
once for a cause and never once for a match; `suggestion` is a key that can be registered as it
stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from patchlab.errors import UnknownCodeError

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

TITLES: dict[str, str] = {
    "PL101": "container",
    "PL102": "exact name that transformers would search",
    "PL103": "match that is no module class",
    "PL104": "key that replaces nothing",
    "PL105": "rule that never decides",
    "PL106": "matched sub-model",
    "PL107": "swallows unmatched modules",
    "PL108": "several roles or signatures under one rule",
    "PL109": "only forward differs",
    "PL110": "other model types",
    "PL201": "constructor does not bind",
    "PL202": "forward argument lost or renamed",
    "PL203": "forward fails or returns something else",
    "PL204": "base class or name that others rely on",
    "PL205": "replaced but never called",
    "PL301": "missing, unexpected or mismatched keys",
    "PL302": "conversion that does not reverse",
    "PL303": "constant lost by from_pretrained",
    "PL304": "tied weights under a replaced module",
    "PL305": "conversion overwritten or shadowed",
    "PL306": "left behind by a swap",
    "PL401": "class left swapped",
    "PL402": "entry registered by others",
    "PL501": "parallel plan",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of an analysis.

    Attributes:
        code: Stable, such as "PL101".
        severity: "error" (the patched model is broken), "warning" (it is likely not what was meant)
            or "info".
        key: The key of the rule it is about, "" where it is about none.
        subject: The class name or FQN it is about.
        message: What was found, where, what to do.
        suggestion: A key that can be registered in place of `key`, "" if there is none.
    """

    code: str
    severity: Severity
    key: str
    subject: str
    message: str
    suggestion: str = ""

    def __post_init__(self) -> None:
        if self.code not in TITLES:
            raise UnknownCodeError(f"{self.code!r} is no finding code; the codes are in TITLES.")
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r} is none of {', '.join(SEVERITIES)}.")

    @property
    def title(self) -> str:
        """What the code stands for, in a few words."""
        return TITLES[self.code]

    def __str__(self) -> str:
        return f"{self.code} {self.title}: {self.message}"


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings without repeats, errors first, then by code, key and subject."""
    unique = dict.fromkeys(findings)
    return tuple(
        sorted(unique, key=lambda f: (SEVERITIES.index(f.severity), f.code, f.key, f.subject))
    )


def has_errors(findings: Iterable[Finding]) -> bool:
    """Tell whether any finding is an error."""
    return any(finding.severity == "error" for finding in findings)
