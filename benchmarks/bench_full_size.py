"""Models that do not fit: what looking at them takes, in seconds and in memory.

    python -m benchmarks.bench_full_size [CASE ...] [--json]

Configs of full size (Llama of 405 billion parameters, DeepSeek-V3, a vision-language model of 72
billion) are previewed, checked against checkpoints of which only the headers exist, and shown as
text and as a widget. Each step runs in a process of its own; "MB" is by how much the
resident size has grown at most since everything was imported. The baseline is building the
skeleton once. Targets: 15 s for each step on two shared cores, and under 1 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import patchlab
from benchmarks.full_size import CONFIGS, write_headers
from benchmarks.report import write_json
from patchlab.model.catalog import load_catalog
from patchlab.model.skeleton import skeleton

SECONDS, MEGABYTES = 15.0, 1000.0


class GateUp(nn.Module):
    """The two projections of a gated feed-forward in one."""

    def __init__(
        self, config: Any, hidden_size: int | None = None, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        hidden = hidden_size or config.hidden_size
        wide = intermediate_size or config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out


# Case → key, and what the modules that are fused lie in; none where the patch is a subclass.
KEYS = {
    "llama-405b": ("^LlamaMLP$", ("mlp",)),
    "deepseek-v3": ("^DeepseekV3MLP$", ("mlp", "mlp.shared_experts")),
    "qwen2.5-vl-72b": ("^Qwen2MLP$", ()),
}


def patch_of(case: str) -> dict[str, type[nn.Module]]:
    """Return the mapping of a case."""
    key, fused = KEYS[case]
    if fused:
        return {key: GateUp}
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    return {key: type("SameMLP", (Qwen2MLP,), {"__module__": __name__})}


def conversions_of(case: str, config: Any) -> dict[str, list[Any]]:
    """Return the model's own conversions with those of the patch, if it needs any."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    own = get_checkpoint_conversion_mapping(config.model_type) or []
    fuse = [
        transformers.WeightConverter(
            source_patterns=[f"{holder}.gate_proj", f"{holder}.up_proj"],
            target_patterns=[f"{holder}.gate_up_proj"],
            operations=[transformers.Concatenate(dim=0)],
        )
        for holder in KEYS[case][1]
    ]
    return {config.model_type: [*own, *fuse]} if fuse else {}


def show_widget(config: Any) -> None:
    """Build the widget of the skeleton, with what it sends to the browser."""
    from patchlab.notebook.tree_views import widget_for

    widget = widget_for(patchlab.module_tree(skeleton(config)))
    assert widget is not None
    assert widget.get_state()


def steps(case: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Return what is measured: name → what to run."""
    config = CONFIGS[case]()
    mapping = patch_of(case)
    return {
        "skeleton": lambda: skeleton(config),
        "preview": lambda: patchlab.preview(config, mapping).to_text(),
        "check_checkpoint": lambda: patchlab.check_checkpoint(
            folder, None, mapping, conversions=conversions_of(case, config)
        ).to_text(),
        "tree as text": lambda: patchlab.module_tree(skeleton(config)).to_text(),
        "tree widget": lambda: show_widget(config),
    }


def run_step(case: str, step: str, folder: Path) -> dict[str, float]:
    """Run one step in this process."""
    load_catalog()
    run = steps(case, folder)[step]
    __import__(type(CONFIGS[case]()).__module__.replace("configuration", "modeling"))
    before = peak_memory(reset=True)
    start, processor = time.perf_counter(), time.process_time()
    run()
    return {
        "seconds": time.perf_counter() - start,
        "processor seconds": time.process_time() - processor,
        "megabytes": (peak_memory() - before) / 1024,
    }


def peak_memory(*, reset: bool = False) -> int:
    """Return the largest resident size so far in kB; after a reset, from what it is now on."""
    status = Path("/proc/self/status")
    if not status.exists():  # no Linux: the peak of the imports counts as well
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0])


def measure(case: str) -> dict[str, dict[str, float]]:
    """Run each step of a case in a process of its own."""
    results = {}
    command = (sys.executable, "-m", "benchmarks.bench_full_size")
    with tempfile.TemporaryDirectory() as name:
        total = write_headers(CONFIGS[case](), Path(name))
        print(f"{case}: a checkpoint of {total / 1e9:,.0f} GB")
        for step in steps(case, Path(name)):
            ran = subprocess.run(
                [*command, case, "--step", step, "--folder", name],
                capture_output=True,
                text=True,
                check=True,
            )
            results[step] = json.loads(ran.stdout.splitlines()[-1])
    return results


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CONFIGS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(run_step(options.cases[0], options.step, options.folder)))
        return
    facts = {case: measure(case) for case in options.cases or CONFIGS}
    print(f"{'case':16}{'what':20}{'s':>8}{'CPU s':>8}{'ratio':>8}{'MB':>8}  target")
    for case, found in facts.items():
        base = found["skeleton"]["processor seconds"]
        for step, figures in found.items():
            holds = figures["seconds"] <= SECONDS and figures["megabytes"] <= MEGABYTES
            print(
                f"{case:16}{step:20}{figures['seconds']:8.2f}{figures['processor seconds']:8.2f}"
                f"{figures['processor seconds'] / base:8.1f}{figures['megabytes']:8.0f}"
                f"  {'holds' if holds else 'MISSED'}"
            )
    if options.json:
        write_json("full_size", [], facts)


if __name__ == "__main__":
    main()
