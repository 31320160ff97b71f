"""What a scope costs: entering and leaving it, building under it, importing patchlab.

    python -m benchmarks.bench_scope [--rounds 9] [--json]

Each is measured against transformers' own `apply_patches`, a plain build or a bare interpreter, in
turns in the same run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
import time

import torch
import transformers
from torch import nn
from transformers import monkey_patching
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from benchmarks.report import Measured, compare, print_table, write_json

SCOPES = 200
IMPORT_LIMIT = 50
IMPORTS = ("bert", "gpt2", "llama", "mistral", "qwen2_moe", "t5", "vit", "whisper")


class MyMLP(LlamaMLP):
    """A replacement that changes nothing."""


class MySelfAttention(BertSelfAttention):
    """A replacement that changes nothing."""


def enter_and_leave(rounds: int) -> list[Measured]:
    """One entering and leaving of transformers' own patch against many scopes of ours."""
    for name in IMPORTS:
        __import__(f"transformers.models.{name}.modeling_{name}")
    mapping: dict[str, type[nn.Module]] = {"^LlamaMLP$": MyMLP}

    def theirs() -> None:
        with monkey_patching.apply_patches():
            pass

    def ours() -> None:
        for _ in range(SCOPES):
            with patchlab.patched(mapping):
                pass

    # Registered for transformers' own patch alone: ours has the mapping from its scope.
    monkey_patching.register_patch_mapping(mapping)
    try:
        theirs()
        found = compare("enter + exit", theirs, {"patched": ours}, rounds=rounds)
    finally:
        monkey_patching.clear_patch_mapping()
    return [_shared_by(measured, SCOPES, target=1e-3) for measured in found]


def build_under_a_scope(rounds: int) -> list[Measured]:
    """Building a model under a scope against building it without one.

    On the meta device nothing is allocated or initialized, so that what a scope adds (the report
    walks each model twice) is largest there; it has no target.
    """
    return [
        *_build("build BERT-base", "cpu", rounds, {"patched": 1.05}),
        *_build("BERT-base on meta", "meta", rounds * 4, {}),
    ]


def _build(case: str, device: str, rounds: int, targets: dict[str, float]) -> list[Measured]:
    def plain() -> None:
        with torch.device(device):
            transformers.BertModel(transformers.BertConfig())

    def under() -> None:
        with patchlab.patched({"^BertSelfAttention$": MySelfAttention}):
            plain()

    others = {"again": plain, "patched": under}
    return compare(case, plain, others, rounds=rounds, targets=targets)


def import_patchlab(runs: int) -> dict[str, object]:
    """Milliseconds that importing patchlab adds to a bare interpreter: the fastest of many."""
    seconds: dict[str, list[float]] = {"pass": [], "import patchlab": []}
    for _ in range(runs):
        for program, taken in seconds.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            taken.append(time.perf_counter() - start)
    added = 1e3 * (min(seconds["import patchlab"]) - min(seconds["pass"]))
    verdict = "holds" if added <= IMPORT_LIMIT else "MISSED"
    return {"ms that importing adds": round(added, 1), f"<= {IMPORT_LIMIT} ms": verdict}


def first_scope() -> float:
    """Milliseconds of the first scope in a process that has one architecture loaded."""
    program = """
        import time
        import transformers
        from transformers.models.llama.modeling_llama import LlamaMLP
        import patchlab
        patchlab.patched
        class My(LlamaMLP): ...
        start = time.perf_counter()
        with patchlab.patched({"^LlamaMLP$": My}):
            pass
        print(1e3 * (time.perf_counter() - start))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ran.stdout)


def _shared_by(measured: Measured, runs: int, target: float) -> Measured:
    if measured.name == "baseline":
        return measured
    return Measured(
        measured.case,
        measured.name,
        measured.ratio / runs,
        measured.milliseconds / runs,
        measured.noise,
        target,
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/scope.json")
    arguments = parser.parse_args()
    results = [
        *enter_and_leave(arguments.rounds),
        *build_under_a_scope(arguments.rounds),
    ]
    scope = next(m for m in results if m.case == "enter + exit" and m.name == "patched")
    facts: dict[str, object] = {
        "times faster than apply_patches": round(1 / scope.ratio),
        "ms of a scope": round(scope.milliseconds, 3),
        "ms of the first scope": round(first_scope(), 2),
        **import_patchlab(3 * arguments.rounds),
    }
    print_table(results)
    print(facts)
    if arguments.json:
        print(f"written to {write_json('scope', results, facts)}")


if __name__ == "__main__":
    main()
