"""Many scopes, and interrupts that come when they like: nothing piles up, nothing is left."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from pathlib import Path

import pytest
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from patchlab.apply import construct
from tests.toys import SubMLP, count, llama_config


def memory_of(scopes: int) -> int:
    """Bytes that entering and leaving so many scopes leaves allocated."""
    mapping = {"^LlamaMLP$": SubMLP}
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(scopes):
        with patchlab.patched(mapping):
            pass
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def test_scopes_leave_no_memory_behind():
    tracemalloc.start()
    try:
        memory_of(50)
        # What else goes on in the process, such as a table that grows, comes once; a leak, always.
        few, many = memory_of(50), min(memory_of(300) for _ in range(3))
    finally:
        tracemalloc.stop()
    # A scope that left its frame or report behind would leave some 2,000 bytes each.
    assert many - few < 100 * 250
    assert not construct.open_frame_count()
    init = vars(LlamaMLP)["__init__"]
    assert not hasattr(init, "__wrapped__")


INTERRUPTED = """
    import os, random, signal, threading, time
    import patchlab
    from patchlab.apply import construct
    from tests.leakguard import changed, process_state
    from tests.toys import LlamaMLP, SubMLP, llama_config

    config, chance, armed = llama_config(), random.Random(0), [False]
    LlamaMLP(config)
    def scope():
        return patchlab.patched({"LlamaMLP": SubMLP}, conversions={"llama": []})
    with scope():
        pass
    before = process_state("transformers.models.llama.")

    def interrupt():
        while True:
            time.sleep(chance.random() * 0.01)
            if armed[0]:
                os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    interrupts, wrong, end = 0, [], time.monotonic() + 60
    while interrupts < 25 and time.monotonic() < end:
        try:
            armed[0] = True
            with scope():
                LlamaMLP(config)
                with scope():
                    LlamaMLP(config)
            armed[0] = False
            continue
        except KeyboardInterrupt:
            interrupts += 1
        while True:
            try:  # a signal may be under way still
                armed[0] = False
                time.sleep(0.002)
                with scope():
                    inside = type(LlamaMLP(config))
                break
            except KeyboardInterrupt:
                interrupts += 1
        outside = type(LlamaMLP(config))
        if (inside, outside) != (SubMLP, LlamaMLP) or construct.open_frame_count():
            wrong.append((inside.__name__, outside.__name__, construct.open_frame_count()))
        wrong += changed(before, process_state("transformers.models.llama."))
    print(interrupts, wrong[:3])
"""


def test_real_interrupts_at_any_moment_leave_nothing_behind():
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    interrupts, _, wrong = ran.stdout.strip().partition(" ")
    assert int(interrupts or 0) >= 5, ran.stderr
    assert wrong == "[]"


def test_the_signal_that_the_test_above_sends_interrupts():
    """Guards the test above."""
    with pytest.raises(KeyboardInterrupt), patchlab.patched({"LlamaMLP": SubMLP}):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
    assert count(transformers.LlamaModel(llama_config()), SubMLP) == 0
