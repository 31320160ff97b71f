"""`probe_parallel`: does a patched model compute the same on several ranks as in one process.

    python -m patchlab probe-parallel --patches patches.py --model-type llama --ranks 2

Tensor parallelism splits the projections of a model by the names of its modules, and nothing checks
that the code between them still computes the same: a norm over the split dimension gives each rank
another number, without an error. The probe finds out. It shrinks the config, gives the patched
model random weights, and compares the logits of one process with those of ranks that run on the
CPU (gloo), which are its own children. The unpatched model is probed beside it: what differs there
as well is not the patch's doing.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from patchlab.errors import LaunchError, TargetError
from patchlab.plan.explain import finding_remarks
from patchlab.plan.findings import Finding, ordered
from patchlab.render.rows import Column, Row, Table, Tone
from patchlab.render.shown import Shown
from patchlab.ship.children import Ended, run_ranks
from patchlab.ship.shrink import shrunken

Mode = Literal["tp", "save", "ep", "fsdp", "pp"]
MODES: dict[str, str] = {
    "tp": "tensor parallel",
    "save": "saved by the ranks",
    "ep": "expert parallel",
    "fsdp": "FSDP2",
    "pp": "pipeline parallel",
}
ONE = "one process, reloaded"
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one way of running the model gave.

    Attributes:
        model: "unpatched" or "patched".
        mode: How it ran, "tensor parallel" or "one process, reloaded".
        difference: The largest difference of a logit to one process, in units of the largest logit
            where that is over 1; None where the run failed.
        verdict: "same", "differs", "fails" or "not run".
        message: The error, with the line of the replacement it was raised in, or what is odd; ""
            without either.
        held: Which share of the parameters a rank holds at most; 1 where nothing is split.
    """

    model: str
    mode: str
    difference: float | None
    verdict: Literal["same", "differs", "fails", "not run"]
    message: str = ""
    held: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ParallelProbe(Shown):
    """Whether a patched model computes the same on several ranks; made by `probe_parallel`.

    Attributes:
        class_name: The class of the model.
        ranks: How many there were.
        tolerance: The difference that counts as none.
        results: One for each run; those of the patched model are "not run" if nothing is replaced.
        counts: Key → number of modules replaced in the shrunken model.
        findings: What the code of the replacements says about it (PL501), keys that replace nothing
            (PL104), and errors of the preview.
    """

    class_name: str
    ranks: int
    tolerance: float
    results: tuple[ProbeResult, ...]
    counts: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the patched model ran and agreed in every mode."""
        return all(result.verdict == "same" for result in self.patched)

    @property
    def patched(self) -> tuple[ProbeResult, ...]:
        """The results of the patched model."""
        return tuple(result for result in self.results if result.model == "patched")

    @property
    def _is_idle(self) -> bool:
        return bool(self.counts) and not any(self.counts.values())

    @property
    def verdict(self) -> str:
        """The result in a line."""
        on = f"{self.class_name} on {self.ranks} ranks"
        bad = [result for result in self.patched if result.verdict != "same"]
        if self._is_idle or (not bad and not self.counts):
            return f"{on}: nothing is replaced in it, so nothing was probed"
        if not bad:
            return f"{on}: the patched model computes what it does in one process"
        plain = {r.mode for r in self.results if r.model == "unpatched" and r.verdict != "same"}
        first = next((r for r in bad if r.verdict != "not run"), bad[0])
        also = ", and so does the unpatched one" if first.mode in plain else ""
        if first.verdict == "fails":
            return f"{on}: the patched model fails ({first.mode}){also}"
        if first.difference is None:
            return f"{on}: the patched model was not run ({first.mode}){also}"
        if first.mode == MODES["save"]:
            return f"{on}: what the ranks save is another model, without an error"
        silent = "silently " if not first.message else ""
        return f"{on}: the patched model {silent}computes something else ({first.mode}){also}"

    def to_table(self) -> Table:
        """Return a row for each run, errors and findings below."""
        tones: dict[str, Tone] = {"same": "ok", "differs": "error", "fails": "error"}
        rows = [
            Row(
                0,
                result.mode,
                (
                    result.model,
                    "" if result.held is None else f"{result.held:.0%}",
                    _written(result.difference),
                ),
                tones.get(result.verdict, "dim"),
                mark={"same": "●", "not run": ""}.get(result.verdict, "✕"),
                note=result.verdict,
                title=result.message,
            )
            for result in self.results
        ]
        columns = (
            Column("Mode"),
            Column("Model"),
            Column("A rank holds", "right"),
            Column("Max difference", "right"),
        )
        errors = [
            f"{result.model}, {result.mode}: {result.message}"
            for result in self.results
            if result.message
        ]
        footer = (*errors, *finding_remarks(self.findings))
        tone: Tone = "ok" if self.ok else "error"
        return Table(columns, tuple(rows), self.verdict, tone, footer, "Verdict")


def probe_parallel(
    patches: str | Path | Sequence[str | Path],
    config: Any,
    *,
    ranks: int = 2,
    tp_plan: Mapping[str, str] | Literal["auto"] = "auto",
    modes: Sequence[Mode] = ("tp", "save"),
    shrink: bool = True,
    tolerance: float = TOLERANCE,
    timeout: float = 120,
) -> ParallelProbe:
    """Compare the logits of a patched model in one process and on several ranks.

    Nothing is registered in this process. The ranks are child processes on the CPU; they end with
    this call, however it ends.

    Args:
        patches: One patch file or several.
        config: A config of transformers, a checkpoint folder or model id whose config is read, or a
            model type such as "llama".
        ranks: How many processes.
        tp_plan: As for transformers' `DistributedConfig`: "auto" for the model's own, or rules to
            add to it. With "auto", rules from a dict `TP_PLAN` in a patch file are added.
        modes: Of "tp", "save" (what tensor-parallel ranks have saved, in one process), "ep" (expert
            parallel), "fsdp" and "pp".
        shrink: Whether sizes are made small; without it the model is built as the config says.
        tolerance: The difference that counts as none.
        timeout: Seconds that a launch of the ranks may take.

    Returns:
        The result; `.ok` says whether the patched model agreed.

    Raises:
        TargetError: There is no such config, or it cannot be shrunk to one whose model runs.
        LaunchError: A patch file cannot be registered, or the ranks cannot be started.
    """
    files = [patches] if isinstance(patches, str | Path) else list(patches)
    if ranks < 2:
        raise LaunchError(f"{ranks} ranks are none to compare with. Give 2 or more.")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise LaunchError(f"unknown mode {unknown}; there are {', '.join(MODES)}.")
    for file in files:
        if not Path(file).is_file():
            raise LaunchError(f"no patch file {str(file)!r}. Give the file that registers them.")
    whole = config_of(config)
    with tempfile.TemporaryDirectory(prefix="patchlab-probe-") as name:
        folder = Path(name)
        small = shrunken(whole, ranks) if shrink else whole
        small.architectures = [_class_name(small)]
        if shrink:
            _check_that_it_runs(small)
        small.save_pretrained(folder)
        job = {
            "patches": [str(Path(file).absolute()) for file in files],
            "ranks": ranks,
            "tp_plan": tp_plan if tp_plan == "auto" else dict(tp_plan),
            "timeout": timeout,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        plain = [mode for mode in modes if mode != "save"]
        tasks = [f"plain-{mode}" for mode in ("one", *plain)]
        tasks += [f"patched-{mode}" for mode in ("one", *modes)]
        results = _run_tasks(tasks, folder, ranks, timeout, tolerance)
        found = folder / "findings.json"
        known = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
        counts = known.get("counts", {})
        if counts and not any(counts.values()):
            # What ran as the patched model was the unpatched one once more, and proves nothing.
            results = [
                _result_of(task, None, "not run") if task.startswith("patched-") else result
                for task, result in zip(tasks, results, strict=True)
            ]
        return ParallelProbe(
            small.architectures[0],
            ranks,
            tolerance,
            tuple(_with_shares(results, folder, ranks)),
            counts,
            ordered(Finding(**finding) for finding in known.get("findings", ())),
        )


def config_of(target: Any) -> Any:
    """Return the config of a target: itself, a folder's, a model id's, or a model type's default.

    Raises:
        TargetError: There is none.
    """
    import transformers

    from patchlab.model.skeleton import model_builder

    if isinstance(target, str) and target in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(target)
    return model_builder(target)[1]


def _check_that_it_runs(config: Any) -> None:
    """Build the model of a shrunken config and run it once: neither is the patch's doing."""
    import torch
    import transformers

    from patchlab.ship.probe_rank import logits_of

    name = config.architectures[0]
    try:
        with torch.random.fork_rng(devices=[]):
            found = logits_of(getattr(transformers, name)(config).eval())
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"the {name} of the shrunken {type(config).__name__} does not run on tokens: "
            f"{type(error).__name__}: {line}. Give --config with one that is small already and "
            f"--as-it-is, or the model type of the text model in it."
        ) from error
    if found is None:
        raise TargetError(
            f"{name} returns neither logits nor hidden states for tokens. Give the model type of "
            f"the text model in it."
        )


def _run_tasks(
    tasks: list[str], folder: Path, ranks: int, timeout: float, tolerance: float
) -> list[ProbeResult]:
    """Run tasks until one fails, and the rest in fresh processes; those that need it are left."""
    results: dict[str, ProbeResult] = {}
    waiting = list(tasks)
    while waiting:
        ended = run_ranks(
            "patchlab.ship.probe_rank",
            [str(folder), *waiting],
            ranks=ranks,
            folder=folder,
            timeout=timeout,
        )
        done = 0
        for task in waiting:
            result = _result(task, folder, ranks, ended, tolerance)
            results[task] = result
            done += 1
            if result.verdict == "fails":
                break
        waiting = waiting[done:]
        failed = [task for task, result in results.items() if result.verdict == "fails"]
        for task in list(waiting):
            which = task.partition("-")[0]
            # Without a folder to load from, or without a model that ranks could save.
            if f"{which}-one" in failed or (task == "patched-save" and "patched-tp" in failed):
                results[task] = _result_of(task, None, "not run")
                waiting.remove(task)
    return [results[task] for task in tasks]


def _result(
    task: str, folder: Path, ranks: int, ended: Sequence[Ended], tolerance: float
) -> ProbeResult:
    notes = [_note(folder, task, rank) for rank in range(ranks)]
    errors = [note for note in notes if note and "error" in note]
    if errors:
        # Of several errors the one that names a line of the patch file comes first: a rank that
        # waits for another one fails as well, and only says that the other is gone.
        first = next((note for note in errors if note["where"]), errors[0])
        where = f" ({first['where']})" if first["where"] else ""
        return _result_of(task, None, "fails", f"{first['error']}{where}")
    if any(note is None for note in notes):
        gone = next((end for end in ended if end.status), ended[0])
        if any(end.timed_out for end in ended):
            return _result_of(task, None, "fails", "the ranks did not finish in time.")
        lines = [line for line in gone.output.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else "nothing"
        return _result_of(task, None, "fails", f"rank {gone.rank} ended, saying: {said}")
    differences = [note["difference"] for note in notes if note and "difference" in note]
    if not differences:
        return _result_of(task, None, "not run", "no rank has logits.")
    # A difference that is no number is the largest there is.
    worst = max(math.inf if math.isnan(value) else value for value in differences)
    return _result_of(task, worst, "same" if worst <= tolerance else "differs")


def _with_shares(results: Sequence[ProbeResult], folder: Path, ranks: int) -> Iterator[ProbeResult]:
    """Say which share of the parameters a rank held, and where nothing was split that should."""
    names = {name: mode for mode, name in MODES.items()} | {ONE: "one"}
    whole: dict[str, int] = {}
    for result in results:
        task = f"{'plain' if result.model == 'unpatched' else 'patched'}-{names[result.mode]}"
        notes = [_note(folder, task, rank) or {} for rank in range(ranks)]
        held = max((note.get("held", 0) for note in notes), default=0)
        if result.mode == ONE:
            whole[result.model] = held
        total = whole.get(result.model)
        if result.difference is None or not held or not total:
            yield result
            continue
        share = held / total
        idle = "" if share < 1 or result.mode == ONE else "no parameter was split by the plan."
        yield replace(result, held=share, message=result.message or idle)


def _note(folder: Path, task: str, rank: int) -> dict[str, Any] | None:
    path = folder / f"{task}.rank{rank}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _result_of(
    task: str,
    difference: float | None,
    verdict: Literal["same", "differs", "fails", "not run"],
    message: str = "",
) -> ProbeResult:
    which, _, mode = task.partition("-")
    name = ONE if mode == "one" else MODES[mode]
    model = "unpatched" if which == "plain" else "patched"
    return ProbeResult(model, name, difference, verdict, message)


def _class_name(config: Any) -> str:
    """Return the model that computes logits, where there is one for such a config."""
    import transformers

    given = list(getattr(config, "architectures", None) or ())
    if given and hasattr(transformers, given[0]):
        return str(given[0])
    auto = transformers.models.auto.modeling_auto
    several = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ]
    # The text model of a multimodal config takes the part of it (transformers 5.24.0, qwen3_5).
    if hasattr(config, "text_config"):
        several.insert(0, several.pop(1))
    for names in several:
        if config.model_type in names:
            found = names[config.model_type]
            return str(found[0] if isinstance(found, tuple | list) else found)
    from patchlab.model.skeleton import model_class_of

    return model_class_of(config).__name__


def _written(difference: float | None) -> str:
    return "" if difference is None else f"{difference:.2g}"
