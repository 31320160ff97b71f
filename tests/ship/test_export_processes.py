"""An exported file patches models in a fresh process, with patchlab and without."""

from __future__ import annotations

import subprocess
import sys

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.exports import CELLS, JOB, SCALING, SESSION, TINY, last_json, run_python

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
IDS = torch.arange(12).reshape(3, 4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with the file that a script has exported, and two tiny checkpoints."""
    folder = tmp_path_factory.mktemp("exported")
    for name, text in (("session.py", SESSION), ("scaling.py", SCALING), ("job.py", JOB)):
        (folder / name).write_text(text, encoding="utf-8")
    names, stable = last_json(run_python("session.py", "patches.py", cwd=folder))
    torch.manual_seed(0)
    logits = {}
    for name, (config, model_class) in MODELS.items():
        model = model_class(config(**TINY)).eval()
        model.save_pretrained(folder / name)
        logits[name] = model(IDS).logits.sum(-1)
    return folder, names, stable, logits


@pytest.fixture(scope="module")
def shown(exported):
    """What the last cell of a real kernel shows, which has exported its classes."""
    path = exported[0] / "from_cells.py"
    cells = [nbformat.v4.new_code_cell(cell.replace("{path}", str(path))) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    return path, notebook.cells[-1].outputs[-1]["data"]


@pytest.fixture(scope="module", params=["with", "without"])
def job(request, exported, shown):
    """What a training job says of itself, with patchlab and without."""
    folder, *_ = exported
    return request.param, last_json(run_python("job.py", request.param, *MODELS, cwd=folder))


def test_file_holds_what_the_classes_need_and_nothing_else(exported):
    _, names, _, _ = exported

    assert set(names) == {
        *("SCALE", "CALLS", "PARTS", "rate", "counted", "Gated", "MyMLP", "Part", "FusedAttention"),
        *("query_key_value_sizes", "ConcatenateByConfig", "SplitByConfig"),
        *("PatchlabError", "CheckpointError", "Sizes"),
    }


def test_classes_of_the_file_are_in_the_models_that_a_job_builds_and_loads(job):
    _, said = job

    for name, original in (("llama", "Llama"), ("qwen2", "Qwen2")):
        for how in ("made", "loaded"):
            assert "MyMLP" in said[name][how]
            assert f"{original}MLP" not in said[name][how]
    assert "FusedAttention" in said["llama"]["made"]
    assert "FusedAttention" in said["llama"]["loaded"]
    assert "FusedAttention" not in said["qwen2"]["loaded"]
    assert said["calls"] == 4  # two layers of two models


def test_fused_weights_load_and_compute_what_the_original_did(job, exported):
    _, said = job
    logits = exported[3]

    for name in MODELS:
        assert said[name]["missing"] == said[name]["unexpected"] == []
        torch.testing.assert_close(
            torch.tensor(said[name]["logits"]), logits[name], rtol=1e-5, atol=1e-4
        )


def test_fused_weights_save_as_they_were(job, exported):
    folder = exported[0]

    for name in MODELS:
        before = load_file(folder / name / "model.safetensors")
        after = load_file(folder / f"{name}-saved" / "model.safetensors")
        assert sorted(before) == sorted(after)
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_file_from_a_kernel_holds_the_classes_as_they_were_defined_last(shown):
    text = shown[0].read_text(encoding="utf-8")

    assert "version = 2" in text
    assert "version = 1" not in text
    assert "double(super().forward(x)) / FACTOR" in text
    assert "ipykernel" not in text


def test_job_builds_models_with_the_classes_of_the_cells(job):
    _, said = job

    assert said["cells"] == ["MyMLP", "from_cells", 2]
    assert said["computes"]


def test_magic_shows_the_file_that_it_has_written(shown):
    path, bundle = shown

    assert path.read_text(encoding="utf-8") in bundle["text/plain"]
    assert "<pre>" in bundle["text/html"]


def test_registering_twice_is_registering_once_and_says_what(job):
    how, said = job

    assert said["same"]
    assert said["keys"] == ["LlamaMLP", "^LlamaAttention$", "Qwen2MLP", "OPTNorm"]
    # Guards the runs without: the probe would pass if patchlab were there all the same.
    assert said["loaded patchlab"] is (how == "with")


def test_same_patches_give_the_same_bytes(exported, job):
    folder, _, stable, _ = exported
    first = (folder / "patches.py").read_bytes()

    assert stable
    assert (folder / "other.py").read_bytes() == first
    assert str(folder).encode() not in first


def test_formatter_leaves_the_file_as_it_is(exported):
    path = exported[0] / "patches.py"

    ran = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", str(path)],
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stdout


def test_header_names_versions_packages_and_files_of_the_users(exported):
    text = (exported[0] / "patches.py").read_text(encoding="utf-8")
    header = text.partition("\nimport ")[0].replace("\n#", "")

    assert f"torch {torch.__version__}" in header
    assert "It also imports scaling, which no package installs" in header
    assert "warning PL104 key that replaces nothing: key 'OPTNorm'" in header
    assert "from scaling import Scaled\n" in text
    assert "class Scaled" not in text
