"""Explanations: for each finding code what is wrong, why it matters, and what is right.

They are pages beside this file, `codes/PL101.md` and so on, each with the same four sections and
two examples that can be run: the first gives the finding, the second does not. Whoever lists
findings takes the lines from here, so that the way to the page is under every list.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, overload

from patchlab.errors import FindingsError, UnknownCodeError
from patchlab.plan.findings import TITLES, Finding
from patchlab.render.markdown import markdown_html
from patchlab.render.rows import Column, Remark, Row, Table
from patchlab.render.shown import Shown

SECTIONS = ("What is wrong", "Why it matters", "Wrong", "Right")


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """What one finding code means.

    Attributes:
        code: The code, such as "PL101".
        title: What it stands for, in a few words.
        markdown: The page, in Markdown.
    """

    code: str
    title: str
    markdown: str

    @property
    def what(self) -> str:
        """What is wrong, as one line."""
        return " ".join(self._section("What is wrong").split())

    @property
    def why(self) -> str:
        """Why it matters, as one line."""
        return " ".join(self._section("Why it matters").split())

    @property
    def wrong(self) -> str:
        """Python that gives the finding; its last line is a value with `findings`."""
        return self._code("Wrong")

    @property
    def right(self) -> str:
        """Python that goes on from there and does not give it."""
        return self._code("Right")

    def to_text(self, **options: Any) -> str:
        """Return the page as it is written, in Markdown."""
        return self.markdown

    def to_html(self, **options: Any) -> str:
        """Return the page as static HTML."""
        return markdown_html(self.markdown)

    def to_table(self) -> Table:
        """Return a row for each section."""
        rows = tuple(Row(0, name, (self._section(name),)) for name in SECTIONS)
        caption = f"{self.code} {self.title}"
        return Table((Column("Section"), Column("Text")), rows, caption)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {**super()._repr_mimebundle_(), "text/markdown": self.markdown}

    def _section(self, name: str) -> str:
        found = re.search(rf"^## {name}\n(.+?)(?=^## |\Z)", self.markdown, re.M | re.S)
        assert found is not None, f"{self.code} has no section {name!r}"
        return found[1].strip()

    def _code(self, name: str) -> str:
        found = re.search(r"^```python\n(.+?)^```$", self._section(name), re.M | re.S)
        assert found is not None, f"section {name!r} of {self.code} has no example"
        return found[1]


@dataclass(frozen=True, repr=False)
class Codes(Shown):
    """All finding codes, in order, with what they stand for."""

    codes: tuple[str, ...]

    def to_table(self) -> Table:
        """Return a row for each code."""
        rows = tuple(Row(0, code, (TITLES[code],)) for code in self.codes)
        columns = (Column("Code", mono=True), Column("What it stands for"))
        return Table(columns, rows, f"{len(rows)} finding codes", footer=(_pointer("PL101"),))


@overload
def explain(code: None = None) -> Codes: ...
@overload
def explain(code: str | Finding) -> Explanation: ...
def explain(code: str | Finding | None = None) -> Explanation | Codes:
    """Say what a finding means: what is wrong, why it matters, and what is right.

    Args:
        code: A code such as "PL101", in any case, or a finding; None for the list of all codes.

    Returns:
        A value that shows itself as text, Markdown and HTML.

    Raises:
        UnknownCodeError: There is no such code; the message has the nearest.

    Example:
        >>> explain("pl104").title
        'key that replaces nothing'
    """
    if code is None:
        return Codes(tuple(TITLES))
    asked = code.code if isinstance(code, Finding) else code
    name = asked.strip().upper() if isinstance(asked, str) else ""
    if name not in TITLES:
        raise UnknownCodeError(
            f"{asked!r} is no finding code. {_near(name)}patchlab.explain() lists all of them."
        )
    return _explanation(name)


def finding_lines(findings: Iterable[Finding], *, severity: bool = False) -> tuple[str, ...]:
    """Return a line for each finding, and one more that says where to read on.

    Args:
        findings: In the order in which they are shown; none gives no line.
        severity: Whether each line begins with the finding's severity.
    """
    told = tuple(findings)
    if not told:
        return ()
    return (*(f"{f.severity}: {f}" if severity else str(f) for f in told), _pointer(told[0].code))


def raise_errors(verdict: str, findings: Iterable[Finding]) -> None:
    """Raise what is wrong if a finding is an error.

    Args:
        verdict: The first line of the message: what was looked at.
        findings: Of any severity.

    Raises:
        FindingsError: There are errors; the message has them all.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise FindingsError("\n".join([verdict, *finding_lines(errors)]))


def finding_remarks(findings: Iterable[Finding]) -> tuple[Remark | str, ...]:
    """Return the lines of `finding_lines` with what opens under each in HTML."""
    told = tuple(findings)
    if not told:
        return ()
    return (*(Remark(str(f), more_about(f)) for f in told), _pointer(told[0].code))


def more_about(finding: Finding) -> str:
    """Return what is wrong and why, in a paragraph without markup."""
    page = _explanation(finding.code)
    return f"{page.what} {page.why}".replace("`", "")


@functools.cache
def _explanation(code: str) -> Explanation:
    page = importlib.resources.files("patchlab.plan").joinpath("codes", f"{code}.md")
    return Explanation(code, TITLES[code], page.read_text(encoding="utf-8"))


def _pointer(code: str) -> str:
    return f'patchlab.explain("{code}") says more.'


def _near(name: str) -> str:
    # A number alone, a typo, or the title in place of the code.
    titles = {title.upper(): code for code, title in TITLES.items()}
    near = [code for code in TITLES if name and code.endswith(name)]
    near += [titles[title] for title in difflib.get_close_matches(name, titles, 2, 0.7)]
    near += difflib.get_close_matches(name, TITLES, 3, 0.3 if name.startswith("PL") else 0.7)
    shown = [f"{code} ({TITLES[code]})" for code in [*dict.fromkeys(near)][:3]]
    return f"Did you mean {' or '.join(shown)}? " if shown else ""
