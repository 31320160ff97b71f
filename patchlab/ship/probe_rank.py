"""One rank of a probe: `python -m patchlab.ship.probe_rank FOLDER TASK...`, started by `probe`.

Rank 0 builds the shrunken models, gives them random weights of a size that keeps the logits near 1,
saves them, and computes the logits of one process. Then all ranks load the same folders with a
`DistributedConfig`, run the same tokens, and compare. Everything goes into JSON files in the
folder, one for each task and rank, so that what a rank has found outlives it.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchlab.ship.children import leave_with_parent

BATCH, LENGTH, SEED = 3, 7, 0


def main(words: list[str]) -> int:
    """Run the tasks that are named, in order; 1 after one that failed."""
    leave_with_parent()
    warnings.simplefilter("ignore")
    folder, tasks = Path(words[0]), words[1:]
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch
    import torch.distributed as dist
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{'-'.join(tasks)}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=job["timeout"]),
    )
    patched = False
    for name in tasks:
        with _noted(folder, name, rank) as note:
            if name.startswith("patched") and not patched:
                _register(job, folder, rank)
                patched = True
            note |= _run(name, job, folder, rank)
        if "error" in note:
            # A rank that failed has left the others waiting: this group is of no use any more.
            return 1
    dist.destroy_process_group()
    return 0


@contextmanager
def _noted(folder: Path, task: str, rank: int) -> Iterator[dict[str, Any]]:
    note: dict[str, Any] = {}
    try:
        yield note
    except Exception as error:  # noqa: BLE001  (whatever a replacement does is a result)
        traceback.print_exc()
        note |= {"error": _first_line(error), "where": _where(error)}
    path = folder / f"{task}.rank{rank}.json"
    path.write_text(json.dumps(note), encoding="utf-8")


def _register(job: dict[str, Any], folder: Path, rank: int) -> None:
    from patchlab.apply.hooks import hold
    from patchlab.ship.patch_file import parallel_plan_of, register_files

    plan = parallel_plan_of(register_files(job["patches"]))
    hold("patchlab probe-parallel")
    if job["tp_plan"] == "auto" and plan:
        job["tp_plan"] = plan
    if rank == 0 and not (folder / "findings.json").exists():
        _write_findings(folder)


def _write_findings(folder: Path) -> None:
    from dataclasses import asdict

    from patchlab.verify.preview import preview

    shown = preview(_config(folder))
    found = {
        "counts": shown.counts,
        "findings": [
            asdict(finding)
            for finding in shown.findings
            if finding.code in ("PL104", "PL501") or finding.severity == "error"
        ],
    }
    (folder / "findings.json").write_text(json.dumps(found), encoding="utf-8")


def _run(name: str, job: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    """Run one task: "plain-one", "plain-tp", "patched-one", "patched-tp" ..."""
    import torch
    import torch.distributed as dist

    which, mode = name.split("-")
    home = folder / which
    if mode == "one":
        found = _prepare(folder, home) if rank == 0 else {}
        dist.barrier()
        return found
    # The unpatched model has its own plan: rules for what is new in a patched one are none of it.
    plan = job["tp_plan"] if which == "patched" else "auto"
    model = _load(home, folder, _distributed_config(mode, job["ranks"], plan))
    held = _held(model)
    if mode == "save":
        model.save_pretrained(home / "saved")
        dist.barrier()
        if rank:
            return {}
        model = _load(home / "saved", folder, None)
    logits = logits_of(model)
    expected = torch.load(home / "logits.pt", weights_only=True)
    found = {} if logits is None else _compared(logits, expected)
    return found | ({} if mode == "save" else {"held": held})


def _distributed_config(mode: str, size: int, plan: Any) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    if mode in ("tp", "save"):
        return DistributedConfig(tp_size=size, tp_plan=plan)
    if mode == "ep":
        return DistributedConfig(tp_size=size, ep_size=size, tp_plan=plan)
    if mode == "fsdp":
        return DistributedConfig(fsdp_size=size)
    return DistributedConfig(pp_size=size)


def _prepare(folder: Path, home: Path) -> dict[str, Any]:
    """Build and save a model, and compare it with itself after a reload in one process."""
    import torch

    from patchlab.apply.scope import apply_patches

    torch.manual_seed(SEED)
    with apply_patches():
        model = _model_class(folder)(_config(folder)).eval()
    _randomize(model)
    logits = logits_of(model)
    model.save_pretrained(home)
    reloaded = logits_of(_load(home, folder, None))
    torch.save(reloaded, home / "logits.pt")
    return _compared(reloaded, logits) | {"held": _held(model)}


def _load(home: Path, folder: Path, distributed: Any) -> Any:
    import torch

    extra = {} if distributed is None else {"distributed_config": distributed}
    torch.manual_seed(SEED)
    return _model_class(folder).from_pretrained(home, dtype=torch.float32, **extra).eval()


def _config(folder: Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)


def _model_class(folder: Path) -> Any:
    from patchlab.model.skeleton import model_class_of

    return model_class_of(_config(folder))


def _randomize(model: Any) -> None:
    """Give every parameter values that matter: initial ones are so small that errors are, too."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() >= 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(noise * 0.1)


def logits_of(model: Any) -> Any:
    """Return the logits of fixed tokens, or else hidden states; None on a stage that has none."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(3, min(vocabulary, 60), (BATCH, LENGTH), generator=generator)
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=False, **extra)
    logits: Any = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "last_hidden_state", None)
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def _held(model: Any) -> int:
    """Return how many elements of parameters this process holds."""
    parameters = {id(p): p for p in model.parameters()}.values()
    return sum(int((p.to_local() if hasattr(p, "to_local") else p).numel()) for p in parameters)


def _compared(logits: Any, expected: Any) -> dict[str, Any]:
    """Return the largest difference, in units of the largest logit if that is over 1."""
    if logits.shape != expected.shape:
        return {
            "error": f"logits of shape {tuple(logits.shape)} instead of {tuple(expected.shape)}",
            "where": "",
        }
    difference = float((logits - expected).abs().max())
    scale = max(1.0, float(expected.abs().max()))
    return {"difference": difference / scale, "scale": scale}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _where(error: BaseException) -> str:
    """Return the last line of the traceback that is of no library: the replacement's."""
    libraries = (
        os.sep + "site-packages" + os.sep,
        str(Path(__file__).parent.parent),
        sys.base_prefix,
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(library in frame.filename for library in libraries)
    ]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
