"""`python -m patchlab probe-parallel`: the arguments of a probe, and its exit status."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchlab.errors import LaunchError, TargetError
from patchlab.plan.wording import listed
from patchlab.ship.probe import TOLERANCE, ParallelProbe, probe_parallel

_PLAN = """Give auto, or such as '{"model.layers.*.mlp.up_proj": "colwise"}'."""


def main(words: Sequence[str]) -> int:
    """Run from the command line: 1 where the patched model does not agree.

    Raises:
        TargetError: As `probe_parallel` does.
        LaunchError: As `probe_parallel` does, or the plan is no JSON.
    """
    options = arguments().parse_args(words)
    import transformers

    if options.model_type not in (None, *transformers.CONFIG_MAPPING):
        near = difflib.get_close_matches(options.model_type, transformers.CONFIG_MAPPING, n=3)
        raise TargetError(
            f"transformers {transformers.__version__} has no model type {options.model_type!r}. "
            f"{f'Near: {listed(near)}.' if near else 'Give one such as llama, or --config.'}"
        )
    log: Any = transformers.utils.logging
    verbosity = log.get_verbosity()
    # What a shrunken config makes transformers warn of is no concern.
    log.set_verbosity_error()
    try:
        probe = _probed(options)
    finally:
        log.set_verbosity(verbosity)
    print(probe.to_text())
    if any("tp_plan=" in finding.message for finding in probe.findings):
        print("To try a tp_plan here, give it to --tp-plan as JSON.")
    return 0 if probe.ok and any(probe.counts.values()) else 1


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m patchlab probe-parallel",
        description="Compare one process with several ranks on a shrunken model of random weights.",
        epilog="The exit status is 0 if the patched model computes the same in every mode, else 1.",
    )
    parser.add_argument(
        "--patches",
        "-p",
        action="append",
        required=True,
        metavar="FILE",
        help="a patch file; several are registered in order",
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--config", metavar="FOLDER_OR_ID", help="a checkpoint folder or id; its config is read"
    )
    target.add_argument("--model-type", metavar="TYPE", help="such as llama; its default config")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes on the CPU (default: 2)"
    )
    parser.add_argument(
        "--tp-plan",
        default="auto",
        metavar="PLAN",
        help="auto for the model's own, or JSON or a file with JSON of rules to add to it",
    )
    parser.add_argument(
        "--modes",
        default="tp,save",
        metavar="MODES",
        help="of tp, save, ep, fsdp, pp, with commas (default: tp,save)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="X",
        help=f"the difference of logits that counts as none (default: {TOLERANCE})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="for each launch of the ranks (default: 120)",
    )
    parser.add_argument("--as-it-is", action="store_true", help="do not shrink the config")
    return parser


def _probed(options: argparse.Namespace) -> ParallelProbe:
    return probe_parallel(
        options.patches,
        options.config if options.model_type is None else options.model_type,
        ranks=options.ranks,
        tp_plan=_plan(options.tp_plan),
        modes=[mode.strip() for mode in options.modes.split(",") if mode.strip()],
        shrink=not options.as_it_is,
        tolerance=options.tolerance,
        timeout=options.timeout,
    )


def _plan(text: str) -> Any:
    if text == "auto":
        return text
    path = Path(text)
    try:
        written = path.read_text(encoding="utf-8") if not text.lstrip().startswith("{") else text
        plan = json.loads(written)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"--tp-plan {text!r} is no auto, JSON or JSON file: {error}. {_PLAN}"
        ) from error
    if not isinstance(plan, dict) or not all(isinstance(style, str) for style in plan.values()):
        raise LaunchError(f"--tp-plan {text!r} is no dict of module name → style. {_PLAN}")
    return plan
