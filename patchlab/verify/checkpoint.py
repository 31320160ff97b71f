"""Checkpoint checks: will these weights load into the patched model, and save again.

Everything is found out before a tensor is read: the headers say names and shapes, the patched
skeleton what the model wants, and transforms and initialization run on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from patchlab._upstream import weight_transforms
from patchlab.apply.construct import Frame
from patchlab.apply.constructing import under
from patchlab.apply.conversions import check_conversions
from patchlab.errors import CheckpointError, TargetError
from patchlab.mapping.registry import registered_mapping
from patchlab.mapping.rules import PatchMapping
from patchlab.model.skeleton import model_builder
from patchlab.plan.explain import finding_remarks, raise_errors
from patchlab.plan.findings import Finding, has_errors, ordered
from patchlab.plan.plan import Replacement, grouped
from patchlab.render.numbers import count
from patchlab.render.rows import Column, Row, Table, Tone
from patchlab.render.shown import Shown
from patchlab.render.text import MAX_TEXT_ROWS, table_text
from patchlab.verify.checkpoint_files import StoredCheckpoint, read_checkpoint
from patchlab.verify.checkpoint_findings import (
    class_findings,
    constant_findings,
    conversion_findings,
    key_findings,
    quantized_findings,
    reversal_findings,
)
from patchlab.verify.checkpoint_keys import Loading, Mismatch, plan_loading
from patchlab.verify.initializing import constants_of, find_initialized
from patchlab.verify.reversibility import Reversal, check_reversals


@dataclass(frozen=True, slots=True)
class ClassWeights:
    """What a load does for the modules of one replaced class; keys are those of the model.

    Attributes:
        key: The key of the rule.
        original: The name of the original class.
        replacement: The name of the replacement class.
        modules: How many there are.
        loaded: Keys that take a tensor of the checkpoint as it is.
        converted: Keys that a conversion makes.
        initialized: Missing keys that the replacement's `init_new_weights` sets.
        random: Missing keys that the model initializes as it does its own, at random mostly.
        uninitialized: Missing keys that nothing initializes: uninitialized memory.
        dropped: Keys of the checkpoint that the originals would have taken.
        constants: Buffers and plain tensors that `from_pretrained` loses.
        mismatched: Keys whose shape differs, which `from_pretrained` refuses.
    """

    key: str
    original: str
    replacement: str
    modules: int
    loaded: tuple[str, ...]
    converted: tuple[str, ...]
    initialized: tuple[str, ...]
    random: tuple[str, ...]
    uninitialized: tuple[str, ...]
    dropped: tuple[str, ...]
    constants: tuple[str, ...]
    mismatched: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """What is worst about it, in a word or two."""
        if self.uninitialized or self.constants:
            return "NOT initialized"
        if self.mismatched:
            return "mismatched"
        if self.dropped:
            return "NOT loaded" if self.random else "dropped"
        return "newly initialized" if self.random else "loaded"


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointReport(Shown):
    """Whether a checkpoint loads into a patched model and saves again; made by `check_checkpoint`.

    Attributes:
        class_name: The class of the model.
        num_keys: How many tensors the checkpoint has.
        num_files: In how many files.
        nbytes: Their size.
        classes: What becomes of the weights of each replaced class.
        missing: Keys of the model that the checkpoint lacks.
        unexpected: Keys of the checkpoint that have no place in the model.
        mismatched: Keys whose shapes differ.
        reversals: Each conversion, run forward and back.
        findings: What is wrong, errors first.
    """

    class_name: str
    num_keys: int
    num_files: int
    nbytes: int
    classes: tuple[ClassWeights, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    reversals: tuple[Reversal, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error: the weights load, and a save gives them back."""
        return not has_errors(self.findings)

    def check(self) -> CheckpointReport:
        """Return the report if no finding is an error.

        Raises:
            FindingsError: There are errors; the message has them all.
        """
        raise_errors(self.verdict, self.findings)
        return self

    @property
    def verdict(self) -> str:
        """The result in a line."""
        tensors, files = count(self.num_keys, "tensor"), count(self.num_files, "file")
        parts = [f"{self.class_name}: {tensors} in {files}"]
        odd = {
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
            "mismatched": len(self.mismatched),
        }
        parts += [f"{number:,} {word}" for word, number in odd.items() if number]
        if not any(odd.values()):
            parts.append("every key has its place")
        wrong = sum(not reversal.ok for reversal in self.reversals)
        if wrong:
            parts.append(f"{count(wrong, 'conversion')} would save corrupt weights")
        elif self.reversals:
            parts.append("all conversions reverse")
        return " · ".join(parts)

    def to_text(self, *, width: int = 200, max_rows: int = MAX_TEXT_ROWS, **options: Any) -> str:
        """Return the table as text, each conversion whole on a line of its own below.

        Columns that are 0 in all rows are left out, but for those of modules and loaded keys.
        """
        table = self.to_table(**options)
        rows = table.rows[: len(self.classes)]
        # Places in the cells, of which the first is the class.
        kept = [
            place
            for place in range(len(table.columns) - 1)
            if place < 3 or any(row.cells[place] != "0" for row in rows)
        ]
        lines = [
            f"{'●' if reversal.ok else '✕'} conversion {reversal.name} · "
            f"{'reverses' if reversal.ok else f'does not reverse: {reversal.problem}'}"
            for reversal in self.reversals
        ]
        table = replace(
            table,
            columns=(table.columns[0], *(table.columns[place + 1] for place in kept)),
            rows=tuple(
                replace(row, cells=tuple(row.cells[place] for place in kept)) for row in rows
            ),
            footer=(*dict.fromkeys(lines), *table.footer),
        )
        return table_text(table, width=width, max_rows=max_rows)

    def to_table(self) -> Table:
        """Return a row for each replaced class and each conversion, findings below."""
        rows = []
        for item in self.classes:
            bad = bool(item.mismatched) or any(
                f.severity == "error" and (f.key, f.subject) == (item.key, item.replacement)
                for f in self.findings
            )
            counted = (
                f"{item.original} → {item.replacement}",
                str(item.modules),
                str(len(item.loaded)),
                str(len(item.converted)),
                str(len(item.initialized)),
                str(len(item.random)),
                str(len(item.uninitialized)),
                str(len(item.dropped)),
                str(len(item.mismatched)),
            )
            state = item.state
            tone: Tone = "error" if bad else "match" if state == "loaded" else "warning"
            odd = (item.uninitialized, item.constants, item.mismatched, item.dropped, item.random)
            title = ", ".join([key for keys in odd for key in keys][:12])
            mark = "✕" if bad else "●"
            rows.append(Row(0, item.key, counted, tone, mark=mark, note=state, title=title))
        blank = ("",) * 8
        for reversal in self.reversals:
            said = "reverses" if reversal.ok else reversal.problem
            tone = "ok" if reversal.ok else "error"
            mark = "●" if reversal.ok else "✕"
            cells = (reversal.name, *blank)
            rows.append(Row(0, "conversion", cells, tone, mark=mark, note=said, title=said))
        titles = (
            *("Modules", "Loaded", "Converted"),
            *("By its own code", "Random", "Not initialized", "Dropped", "Mismatched"),
        )
        columns = (
            Column("Key", mono=True),
            Column("Class", mono=True),
            *(Column(title, "right") for title in titles),
        )
        verdict: Tone = "error" if not self.ok else "warning" if self.findings else "ok"
        return Table(
            columns, tuple(rows), self.verdict, verdict, finding_remarks(self.findings), "State"
        )


def check_checkpoint(
    target: Any,
    checkpoint: str | Path | None = None,
    mapping: dict[str, type[nn.Module]] | None = None,
    *,
    conversions: dict[str, list[Any]] | None = None,
) -> CheckpointReport:
    """Find out whether a checkpoint loads into a patched model, before a tensor is read.

    Keys go through transformers' own renaming and conversions on a patched skeleton. Each
    conversion is run forward and back on random tensors of the real shapes, since one that does not
    reverse saves a corrupt checkpoint. New parameters and constants that a load would leave as
    uninitialized memory are found.

    Args:
        target: A model, a config, a folder or a model id.
        checkpoint: A safetensors file, an index, a folder or the id of a model in the local cache;
            None for `target` itself.
        mapping: Key → replacement class; None for what is registered.
        conversions: Model type or class name → weight conversions, as for `patched`.

    Returns:
        A report with `.ok`, `.findings`, `.classes`, `.missing`, `.unexpected`, `.mismatched`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is a pickle.
        TargetError: The target cannot be built.
    """
    if checkpoint is None:
        if not isinstance(target, str | Path):
            raise CheckpointError(
                f"no checkpoint is given, and {type(target).__name__} is not the folder of one. "
                f"Give a folder, a file or a model id as `checkpoint`."
            )
        checkpoint = target
    rules = registered_mapping() if mapping is None else PatchMapping.of(mapping)
    given = check_conversions(conversions)
    stored = read_checkpoint(checkpoint)
    build, config = model_builder(_unwrapped(target))
    frame = Frame(rules, conversions=given)

    def work() -> CheckpointReport:
        try:
            model = build(config)
        except Exception as error:
            raise TargetError(
                f"the patched model cannot be built: {type(error).__name__}: {error}. "
                f"patchlab.preview says more."
            ) from error
        return _report(model, stored, frame)

    return under(frame, work)


def _unwrapped(target: Any) -> Any:
    """Return the model inside of `torch.compile` and data parallel wrappers."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(target, nn.Module) and "_orig_mod" in target._modules:
            target = target._modules["_orig_mod"]
        elif isinstance(target, wrappers):
            target = target.module
        else:
            return target


def _report(model: nn.Module, stored: StoredCheckpoint, frame: Frame) -> CheckpointReport:
    transforms = weight_transforms(model)
    loading = plan_loading(model, stored.tensors, transforms)
    reversals = check_reversals(model, stored.tensors, loading, transforms)
    classes = _class_weights(model, loading, _replacements(model, frame))
    findings = [
        *quantized_findings(getattr(model, "config", None)),
        *key_findings(loading, classes),
        *class_findings(classes, model),
        *constant_findings(classes),
        *reversal_findings(reversals),
        *conversion_findings(model, stored.tensors, loading, transforms, frame.conversions),
    ]
    return CheckpointReport(
        class_name=type(model).__name__,
        num_keys=len(stored.tensors),
        num_files=len(stored.files),
        nbytes=sum(tensor.nbytes for tensor in stored.tensors.values()),
        classes=classes,
        missing=loading.missing,
        unexpected=loading.unexpected,
        mismatched=loading.mismatched,
        reversals=tuple(reversal for _, reversal in reversals),
        findings=ordered(findings),
    )


def _replacements(model: nn.Module, frame: Frame) -> tuple[Replacement, ...]:
    by_id = {
        id(module): replaced
        for replaced in frame.replaced
        if (module := replaced.module()) is not None
    }
    return grouped(
        (fqn, replaced.original, replaced.rule)
        for fqn, module in model.named_modules()
        if (replaced := by_id.get(id(module))) is not None
    )


def _class_weights(
    model: nn.Module, loading: Loading, replacements: tuple[Replacement, ...]
) -> tuple[ClassWeights, ...]:
    replaced = {fqn: i for i, r in enumerate(replacements) for fqn in r.fqns}
    keys = _by_class(loading.state, replaced, len(replacements))
    gone: list[list[str]] = [[] for _ in replacements]
    for key in loading.unexpected:
        place = _innermost(loading.carried.unexpected[key], replaced)
        if place is None:
            place = _innermost(key, replaced)
        if place is not None:
            gone[place].append(key)
    missing = set(loading.missing)
    other_shape = {mismatch.key for mismatch in loading.mismatched}
    weights = []
    for i, replacement in enumerate(replacements):
        found = find_initialized(model, replacement.fqns)
        written = found.by_model | found.by_own
        buffers, plain = constants_of(model, replacement.fqns)
        lacking = [key for key in keys[i] if key in missing]
        fitting = [key for key in keys[i] if key not in other_shape]
        weights.append(
            ClassWeights(
                key=replacement.key,
                original=replacement.original.__name__,
                replacement=replacement.replacement.__name__,
                modules=len(replacement.fqns),
                loaded=tuple(key for key in fitting if key in loading.loaded),
                converted=tuple(key for key in fitting if key in loading.converted),
                initialized=tuple(key for key in lacking if key in found.by_own),
                random=tuple(k for k in lacking if k in found.by_model - found.by_own),
                uninitialized=tuple(key for key in lacking if key not in written),
                dropped=tuple(gone[i]),
                constants=(*(name for name in buffers if name not in written), *plain),
                mismatched=tuple(key for key in keys[i] if key in other_shape),
            )
        )
    return tuple(weights)


def _by_class(keys: Iterable[str], replaced: dict[str, int], number: int) -> list[list[str]]:
    """Sort keys by the replacement whose module they are below."""
    found: list[list[str]] = [[] for _ in range(number)]
    for key in keys:
        place = _innermost(key, replaced)
        if place is not None:
            found[place].append(key)
    return found


def _innermost(key: str, replaced: dict[str, int]) -> int | None:
    """Return the replacement of the innermost replaced module that a key is below."""
    path = key
    while path:
        path = path.rpartition(".")[0]
        if path in replaced:
            return replaced[path]
    return None
