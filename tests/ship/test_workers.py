"""Worker processes: spawned ones are patched if they say so, and those of a DataLoader need not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import patchlab
from patchlab.errors import LaunchError
from patchlab.ship import patch_file
from patchlab.ship.workers import HOOK, VARIABLE, ray_runtime_env, register_from_environment

ROOT = Path(__file__).resolve().parents[2]
PATCHES = """
from transformers.models.llama.modeling_llama import LlamaMLP


class Mine(LlamaMLP):
    pass


MAPPING = {"LlamaMLP": Mine}
"""
BUILD = """
import json, multiprocessing, os, pickle, sys
import patchlab
from patchlab.ship.workers import ray_runtime_env, register_file

def built(_=None):
    import transformers
    size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)
    config = transformers.LlamaConfig(num_hidden_layers=1, **size)
    layer = transformers.AutoModel.from_config(config).layers[0]
    found = patchlab.status()
    return type(layer.mlp).__name__, [entry.key for entry in found.entries], found.ok
"""
SPAWN = (
    BUILD
    + """
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, place):
        worker = torch.utils.data.get_worker_info()
        return place * place, worker.id, len(patchlab.get_patch_mapping())

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool, spawn.Pool(1, register_file, ("patches.py",)) as patched:
        waiting = pool.map_async(built, [0]), patched.map_async(built, [0, 1])
        without, with_it = (result.get(120) for result in waiting)
        # A replacement class goes there and comes back by the name of its file.
        import patches
        same = patched.apply(type, (patches.Mine.__new__(patches.Mine),)) is patches.Mine
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)
    squares = [batch[0].tolist() for batch in loader]
    patched_in_workers = {int(count) for batch in loader for count in batch[2]}
    print(json.dumps({
        "parent": built(), "without": without, "with": with_it, "squares": squares,
        "in_workers": sorted(patched_in_workers), "init": loader.worker_init_fn is None,
        "same": same,
    }))
"""
)
RAY = (
    BUILD
    + """
import ray

@ray.remote(num_cpus=1)
class Actor:
    def built(self):
        return built(), os.getpid()

    def kind(self, cls):
        import sys
        return cls is sys.modules["patches"].Mine

if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    import patches
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False,
        runtime_env=ray_runtime_env("patches.py"),
    )
    try:
        actors = [Actor.remote(), Actor.remote()]
        results = ray.get([actor.built.remote() for actor in actors], timeout=150)
        same = ray.get(actors[0].kind.remote(patches.Mine), timeout=60)
    finally:
        ray.shutdown()
    print(json.dumps({
        "actors": [result for result, _ in results],
        "processes": len({os.getpid(), *(process for _, process in results)}),
        "same": same, "driver": [entry.key for entry in patchlab.status().entries],
    }))
"""
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "patches.py").write_text(PATCHES)
    return tmp_path


def run(folder, text, *words):
    (folder / "script.py").write_text(text)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *words, "script.py"],
        cwd=folder,
        # No worker for whom there is no actor: each takes seconds to import everything.
        env=env | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


PATCHED = ["Mine", ["LlamaMLP"], True]
UNPATCHED = ["LlamaMLP", [], True]


def test_spawned_process_is_patched_where_it_registers_the_file(folder):
    """The script's own process is patched by the launcher, and its DataLoader works as ever."""
    found = run(folder, SPAWN, "-m", "patchlab", "run", "-q", "--patches", "patches.py")

    assert found["parent"] == PATCHED
    assert found["with"] == [PATCHED, PATCHED]
    # Nothing is inherited by a spawned process, and its status says so.
    assert found["without"] == [UNPATCHED]
    assert found["squares"] == [[0, 1, 4, 9], [16, 25, 36, 49]]
    # A forked worker has the registry of its parent, and nothing was put into the loader.
    assert found["in_workers"] == [1]
    assert found["init"] is True
    assert found["same"] is True


def test_ray_actors_are_patched_when_they_start(folder):
    found = run(folder, RAY)

    assert found["actors"] == [PATCHED, PATCHED]
    assert found["processes"] == 3
    assert found["same"] is True
    assert found["driver"] == []


# What Ray is given


def test_runtime_env_names_a_function_and_absolute_files(folder, monkeypatch):
    monkeypatch.chdir(folder)

    env = ray_runtime_env("patches.py")

    assert env["worker_process_setup_hook"] == HOOK
    assert json.loads(env["env_vars"][VARIABLE]) == [str(folder / "patches.py")]
    module, _, name = HOOK.rpartition(".")
    assert getattr(sys.modules[module], name) is register_from_environment


def test_runtime_env_of_a_file_that_is_not_there_is_refused(folder):
    with pytest.raises(LaunchError, match="no patch file"):
        ray_runtime_env(folder / "nowhere.py")
    with pytest.raises(LaunchError, match="no patch file is given"):
        ray_runtime_env()


def test_process_without_the_variable_registers_nothing(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)

    assert register_from_environment() == ()
    assert patchlab.get_patch_mapping() == {}


@pytest.mark.parametrize("text", ["patches.py", "[1]", '{"a": "b"}', '"patches.py"'])
def test_variable_that_is_no_list_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)

    with pytest.raises(LaunchError, match=rf"{VARIABLE} is .* Set it to a JSON list of paths"):
        register_from_environment()


def test_files_of_the_variable_are_registered(folder, monkeypatch):
    path = list(sys.path)
    monkeypatch.setenv(VARIABLE, json.dumps([str(folder / "patches.py")]))
    try:
        (file,) = register_from_environment()
        assert list(patchlab.get_patch_mapping()) == list(file.keys) == ["LlamaMLP"]
    finally:
        patchlab.clear_patch_mapping()
        sys.path[:] = path
        sys.modules.pop("patches", None)
        patch_file._read.clear()
