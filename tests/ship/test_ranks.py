"""Ranks with the same patches go on, and ranks that differ stop before anything is built."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import patchlab
from patchlab.errors import LaunchError
from patchlab.ship import ranks
from patchlab.ship.children import run_ranks
from patchlab.ship.launch import check_ranks
from patchlab.ship.ranks import (
    RankStatus,
    checked_when_initialized,
    compare_through,
    rank_status,
    registry_digest,
)

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATCHES = """
import os
from transformers.models.llama.modeling_llama import LlamaMLP

class Mine(LlamaMLP):
    pass

MAPPING = {"LlamaMLP": Mine}
"""
# Each rank has a key of its own.
DIFFERENT = PATCHES.replace(
    '"LlamaMLP"', '"LlamaMLP" if os.environ["RANK"] == "0" else "^LlamaMLP$"'
)
TRAIN = """
import os, pathlib, sys
import torch.distributed as dist
import transformers
from patchlab.ship.launch import check_ranks

pathlib.Path(f"begun{os.environ.get('RANK', '')}").write_text("")
size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)
config = transformers.LlamaConfig(num_hidden_layers=1, **size)
model = transformers.AutoModelForCausalLM.from_config(config)
name = type(model.model.layers[0].mlp).__name__
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    rank, number = dist.get_rank(), len({status.digest for status in check_ranks()})
    dist.destroy_process_group()
else:
    rank, number = 0, 1
# In one piece: the lines of ranks that write at once would mix.
sys.stdout.write(f"rank {rank} built {name}, {number} digest {sys.argv[1:]}\\n")
sys.stdout.flush()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "patches.py").write_text(PATCHES)
    (tmp_path / "different.py").write_text(DIFFERENT)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def launch(folder, *words, **more):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more
    ran = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False
    )
    return ran.returncode, ran.stdout, ran.stderr


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")


def test_every_rank_of_torchrun_is_patched(folder):
    status, out, err = launch(
        folder, *TORCHRUN, "patchlab", "run", "--patches", "patches.py", "train.py", "--lr", "1"
    )

    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "rank 0 built Mine, 1 digest ['--lr', '1']",
        "rank 1 built Mine, 1 digest ['--lr', '1']",
    ]
    assert "patchlab: rank 0 of 2 · 1 registered (LlamaMLP)" in err
    assert "patchlab: rank 1 of 2 · 1 registered (LlamaMLP)" in err


def test_ranks_of_torchrun_that_differ_stop_before_the_script(folder):
    status, out, err = launch(
        folder, *TORCHRUN, "patchlab", "run", "--patches", "different.py", "train.py"
    )

    assert (status, out) == (1, "")
    assert "the ranks have different patches" in err
    assert err.count("  rank 1 of 2 · 1 registered (^LlamaMLP$)") == 1
    assert "    ^LlamaMLP$ → different.Mine" in err
    assert f"    from {folder / 'different.py'} (" in err
    assert list(folder.glob("begun*")) == []


def test_every_process_of_accelerate_launch_is_patched(folder):
    """On the CPU: `--cpu` alone starts one process, whatever `--num_processes` says."""
    status, out, err = launch(
        folder,
        str(BIN / "accelerate"),
        *("launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m"),
        *("patchlab", "run", "--patches", "patches.py", "train.py", "-x"),
        ACCELERATE_USE_CPU="true",
    )

    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "rank 0 built Mine, 1 digest ['-x']",
        "rank 1 built Mine, 1 digest ['-x']",
    ]
    assert "patchlab: rank 1 of 2 · 1 registered (LlamaMLP)" in err


RANK = """
import pathlib, sys
import torch.distributed as dist
import patchlab
from patchlab.errors import LaunchError
from patchlab.ship.children import leave_with_parent
from patchlab.ship.patch_file import register_patch_file
from patchlab.ship.ranks import check_ranks, checked_when_initialized

leave_with_parent()
folder = pathlib.Path(sys.argv[1])
register_patch_file(folder / "different.py")
import os
try:
    with checked_when_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store",
            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
        )
except LaunchError as error:
    print("stopped:", str(error).splitlines()[0])
patchlab.clear_patch_mapping()
print("now:", len({status.digest for status in check_ranks()}), "digest")
"""


def test_ranks_of_another_launcher_are_compared_when_they_meet(folder, monkeypatch):
    (folder / "rank_of_ranks.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(folder))

    ended = run_ranks("rank_of_ranks", [str(folder)], ranks=2, folder=folder, timeout=120)

    for end in ended:
        assert "stopped: the ranks have different patches" in end.output
        # What is not registered any more does not count, but the file that has been read does,
        # which is the same for both.
        assert "now: 1 digest" in end.output


# In one process


def statuses(*digests):
    size = len(digests)
    return [
        RankStatus(rank, size, "host", 1, ("A",), digest) for rank, digest in enumerate(digests)
    ]


def exchanged(given):
    """Have each status exchanged by a thread of its own; what each got, or its error."""
    store, results = dist.HashStore(), [None] * len(given)

    def exchange(number):
        try:
            results[number] = compare_through(given[number], store)
        except LaunchError as error:
            results[number] = error

    threads = [threading.Thread(target=exchange, args=(n,)) for n in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_every_rank_gets_the_status_of_all():
    given = statuses("a", "a", "a")
    assert exchanged(given) == [tuple(given)] * 3


def test_one_rank_that_differs_is_an_error_in_every_rank():
    results = exchanged(statuses("a", "b", "a"))

    assert all(isinstance(result, LaunchError) for result in results)
    for number, digest in enumerate("aba"):
        own = f"rank {number} of 3 · 1 registered (A) · {digest} · host"
        # Rank 0 has the list, and each of the others its own line only.
        assert [own in str(result) for result in results] == [r in (0, number) for r in range(3)]


def test_what_differs_is_named_once_for_each_digest():
    given = statuses("a", "b", "a")
    files = {"a": ("/x/one.py (12345678)",), "b": ("/x/two.py (9abcdef0)",)}
    given = [replace(s, classes=(f"mine.{s.digest}",), files=files[s.digest]) for s in given]

    message = str(exchanged(given)[0])

    assert message.count("from /x/one.py (12345678)") == message.count("A → mine.a") == 1
    assert message.count("from /x/two.py (9abcdef0)") == message.count("A → mine.b") == 1
    assert message.index("rank 0") < message.index("mine.a") < message.index("rank 1")
    assert message.index("rank 1") < message.index("mine.b") < message.index("rank 2")


def test_status_names_the_class_of_each_key():
    patchlab.register_patch_mapping({"LlamaMLP": One, "^BertLayer$": Two})
    try:
        status = rank_status()
    finally:
        patchlab.clear_patch_mapping()

    assert status.details[-2:] == (
        f"LlamaMLP → {__name__}.One",
        f"^BertLayer$ → {__name__}.Two",
    )
    assert str(status).count("One") == 0


def test_rank_that_never_comes_is_an_error(monkeypatch):
    import datetime

    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=1))

    with pytest.raises(LaunchError, match="rank 0 waited 1 s for the other ranks"):
        compare_through(statuses("a", "a")[0], dist.HashStore())


def test_one_process_is_its_own_only_rank():
    (status,) = check_ranks()

    assert (status.rank, status.world_size, status.keys) == (0, 1, ())
    assert "not patched" in str(status)


def test_rank_is_read_off_what_the_launcher_has_set(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")

    assert str(rank_status()).startswith("rank 3 of 8")


def test_no_agent_is_asked_where_none_says_it_is_there(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    assert ranks.check_ranks_of_agent() is None


class One(nn.Module):
    number = 1


class Two(nn.Module):
    number = 2


def digest_of(*pairs):
    try:
        for key, cls in pairs:
            patchlab.register_patch_mapping({key: cls})
        return registry_digest()
    finally:
        patchlab.clear_patch_mapping()


def test_digest_tells_keys_order_and_classes_apart():
    same = type("One", (One,), {"__module__": "elsewhere"})
    digests = [
        digest_of(),
        digest_of(("A", One)),
        digest_of(("B", One)),
        digest_of(("A", Two)),
        digest_of(("A", One), ("B", Two)),
        digest_of(("B", Two), ("A", One)),
        digest_of(("A", same)),
    ]

    assert len(set(digests)) == len(digests)
    assert digest_of(("A", One)) == digests[1]


@pytest.mark.parametrize("body", ["return x + 1", "return x + 2", "return x - 1", "return -x"])
def test_digest_of_a_class_without_source_goes_by_its_code(body):
    def made(text):
        namespace = {"nn": nn, "__name__": "nowhere"}
        exec(f"class C(nn.Module):\n    def forward(self, x): {text}", namespace)
        return namespace["C"]

    assert digest_of(("A", made(body))) == digest_of(("A", made(body)))
    assert digest_of(("A", made(body))) != digest_of(("A", made("return x")))


def test_init_process_group_is_torchs_own_again_after_it_was_called(tmp_path):
    own = dist.init_process_group
    try:
        with checked_when_initialized():
            assert dist.init_process_group is not own
            dist.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
            )
            assert dist.init_process_group is own
            assert dist.device_mesh.init_process_group is own
    finally:
        dist.destroy_process_group()


def test_init_process_group_is_torchs_own_again_after_an_error():
    own = dist.init_process_group
    with pytest.raises(ValueError, match="of the script"), checked_when_initialized():
        raise ValueError("of the script")

    assert dist.init_process_group is own
    assert dist.distributed_c10d.init_process_group is own


def test_status_of_a_rank_lists_a_few_keys():
    status = replace(statuses("a")[0], keys=tuple("ABCDEF"))
    assert "6 registered (A, B, C and 3 more)" in str(status)
