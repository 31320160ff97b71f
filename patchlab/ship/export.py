"""`export_patches`: what works in a session, as a Python file for a training job.

A registry belongs to one process, and a class of a notebook cannot be pickled. A file with the
classes, what they need, and a `register()` function can be reviewed, kept under version control and
imported by every rank, worker and script.

What is written is what runs: a class is taken with the source that this very class object was made
from, and where that cannot be told, or the class has been changed since, it is refused by name.
"""

from __future__ import annotations

import html
import keyword
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from patchlab._upstream import is_transformers_name
from patchlab.apply.conversions import Conversions, check_conversions, registered_conversions
from patchlab.errors import ExportError
from patchlab.mapping.rules import PatchMapping
from patchlab.plan.couplings import only_forward_finding
from patchlab.plan.explain import finding_remarks
from patchlab.plan.findings import Finding, has_errors, ordered
from patchlab.plan.survey import Survey, survey
from patchlab.plan.wording import listed
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table
from patchlab.render.shown import Shown
from patchlab.ship.code import Code
from patchlab.ship.collect import Collection
from patchlab.ship.in_force import in_force
from patchlab.ship.layout import FileContent, file_text
from patchlab.ship.pieces import ordered_pieces
from patchlab.ship.transforms_code import transform_code
from patchlab.ship.writing import checked_path, write_whole


@dataclass(frozen=True, eq=False, repr=False)
class PatchFile(Shown):
    """A patch file that was written.

    Attributes:
        path: Where it is, absolute.
        text: What it holds.
        names: The classes, functions and constants that are written out in it, in its order.
        keys: The keys of its mapping, in order.
        findings: What the analyses say that need no model; they stand in its header, too.
        notes: What else a reader should know, such as what begins anew in another process.
    """

    path: Path
    text: str
    names: tuple[str, ...]
    keys: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not has_errors(self.findings)

    def to_table(self, **options: Any) -> Table:
        """Return a row for each name that is written out."""
        rules = count(len(self.keys), "rule")
        return Table(
            columns=(Column("Written out", mono=True),),
            rows=tuple(Row(0, name) for name in self.names),
            caption=f"{self.path.name}: {rules} · {count(self.text.count(chr(10)), 'line')}",
            caption_tone="plain" if self.ok else "error",
            footer=(*finding_remarks(self.findings), *self.notes),
        )

    def to_text(self, **options: Any) -> str:
        """Return the caption, and the file as it is."""
        return f"{self.to_table().caption}\n\n{self.text}"

    def to_html(self, **options: Any) -> str:
        """Return the same as static HTML."""
        caption = html.escape(self.to_table().caption)
        return f"<div>{caption}</div><pre>{html.escape(self.text)}</pre>"


def export_patches(
    path: str | os.PathLike[str],
    mapping: dict[str, type[nn.Module]] | None = None,
    *,
    conversions: dict[str, list[Any]] | None = None,
) -> PatchFile:
    """Write patches as a Python file that other processes can import, and people review.

    The file holds the versions and findings as comments, the classes of `__main__` with all that
    they use there (helpers, bases, constants, imports), `MAPPING`, `CONVERSIONS`, and a function
    `register()` that registers both and returns `MAPPING`. Classes that live in a Python module are
    imported from it. It needs no patchlab where it is used: without it, `register()` registers with
    transformers, under keys that mean the same there, and patchlab's own `concatenate_by_config` is
    written out. Constants have the values that they have now; a list that two of them share is a
    list of each there.

    What the session has changed since its statement (an attribute, a list in a class, a default, a
    function put into a package) is refused. Where only running it would tell, or a class fills it
    itself, a note in the header and in `notes` says so.

    The same patches give the same bytes. The file is written whole or not at all; one that
    `export_patches` has written before is replaced, any other is left alone.

    Args:
        path: The file, such as "patches.py".
        mapping: Key → replacement class. If None, what is in force where this is called: the rules
            of the `patched` blocks (or the `%%patched` cell) around it, and what is registered.
        conversions: Model type or class name → weight conversions. If None, those of the blocks
            around this where the mapping is theirs, and those registered with transformers. `{}`
            for none.

    Raises:
        ExportError: Something cannot be written as code, each named with its reason; or the path is
            none that a patch file can have.
        MappingError: A key that can never match, or (`MappingTypeError`) a replacement or
            conversion of the wrong type.
    """
    found_here = in_force()
    rules = found_here.mapping if mapping is None else PatchMapping.of(mapping)
    transforms = check_conversions(conversions)
    if conversions is None:
        transforms = found_here.conversions if mapping is None else registered_conversions()
    if not len(rules) and not transforms:
        raise ExportError(
            "there is nothing to export: no patch is registered, no block is open and no mapping "
            "was given. Register some, or give a mapping: "
            "export_patches('patches.py', {'LlamaMLP': MyMLP})."
        )
    stem = checked_path(path, frozenset()).stem  # A wrong path is told before the work.
    collection = Collection()
    if not stem.isidentifier() or keyword.iskeyword(stem):
        collection.notes.append(
            f"no import statement can name the file {stem}.py. Use it with python -m patchlab run "
            f"--patches, or with register_file of patchlab.ship.workers, or give it another name."
        )
    if mapping is None and found_here.from_scopes:
        collection.notes.append(
            f"the rules of the block that was open when this was written are in it: "
            f"{listed(found_here.from_scopes)}."
        )
    names = {
        rule.key: collection.require_class(rule.replacement, f"for key {rule.key!r}")
        for rule in rules
    }
    codes = _conversion_codes(transforms, collection)
    if collection.problems:
        raise _refusal(path, collection.problems)
    found = survey(rules)
    pieces = ordered_pieces(collection.pieces)
    findings = _findings(rules, found)
    text = file_text(
        FileContent(
            mapping=names,
            conversions=codes,
            pieces=pieces,
            imports=tuple(collection.imports.values()),
            late_annotations=collection.late_annotations,
            findings=findings,
            notes=collection.notes,
            not_modules=_not_modules(found),
        )
    )
    try:
        compile(text, "<patch file>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ExportError(
            f"the file would not compile: {error}. Nothing was written. A name or statement of "
            f"the session reads differently in a file of its own."
        ) from error
    target = checked_path(path, frozenset(i.root for i in collection.imports.values()))
    write_whole(target, text)
    keys = tuple(rule.key for rule in rules)
    written = tuple(piece.name for piece in pieces)
    return PatchFile(target, text, written, keys, findings, tuple(collection.notes))


def _conversion_codes(
    transforms: Conversions, collection: Collection
) -> dict[str, tuple[Code, ...]]:
    codes: dict[str, tuple[Code, ...]] = {}
    for name, items in transforms.items():
        written: list[Code] = []
        for number, item in enumerate(items):
            try:
                written.append(transform_code(item, collection.reference))
            except ExportError as error:
                collection.problems[f"conversion {number} of {name!r}"] = str(error)
        codes[name] = tuple(written)
    return codes


def _findings(rules: PatchMapping, found: Survey) -> tuple[Finding, ...]:
    # PL103 is about transformers' own scan, which NOT_MODULES keeps from doing harm.
    kept = [finding for finding in found.findings if finding.code != "PL103"]
    return ordered([*kept, *_only_forward(rules)])


def _only_forward(rules: PatchMapping) -> Iterator[Finding]:
    """PL109, for replacements that subclass the class they replace."""
    for rule in rules:
        for original in rule.replacement.__mro__[1:]:
            if rule.matches(original.__name__) and is_transformers_name(original.__module__):
                finding = only_forward_finding(rule.key, original, rule.replacement)
                if finding is not None:
                    yield finding
                break


def _not_modules(found: Survey) -> tuple[str, ...]:
    modules = set(found.catalog.names)
    return tuple(sorted({name for names in found.other_names.values() for name in names} - modules))


def _refusal(path: object, problems: dict[str, str]) -> ExportError:
    lines = [f"- {name}: {reason}." for name, reason in problems.items()]
    return ExportError(
        f"{count(len(lines), 'thing')} cannot be exported, and {str(path)!r} was not written:\n"
        + "\n".join(lines)
    )
