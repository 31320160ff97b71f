"""Two ranks on the CPU against one process, for patches that are right and some that are not."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import transformers

import patchlab
from patchlab.errors import LaunchError, TargetError
from patchlab.plan.findings import Finding
from patchlab.ship import probe as probe_module
from patchlab.ship import probe_command
from patchlab.ship.probe import probe_parallel
from patchlab.ship.probe_command import main

EXAMPLES = Path(__file__).parent / "examples"


def verdicts(probe, model="patched"):
    return {result.mode: result.verdict for result in probe.results if result.model == model}


@pytest.fixture
def four_kinds():
    """The classes of a session, which no import finds."""
    name = "four_kinds_of_test"
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "four_kinds.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def test_exported_patches_compute_and_save_on_two_ranks_what_they_do_in_one(four_kinds, tmp_path):
    """A subclass, a fused attention, renamed projections with a plan, and experts, in one model."""
    path = tmp_path / "patches.py"
    patchlab.export_patches(path, four_kinds.MAPPING, conversions=four_kinds.CONVERSIONS)
    config = transformers.Qwen3MoeConfig(mlp_only_layers=[0])

    probe = probe_parallel(path, config, tp_plan=four_kinds.TP_PLAN, modes=("tp", "save", "ep"))

    assert probe.ok, probe.to_text()
    assert all(probe.counts.values())
    assert list(verdicts(probe)) == [
        "one process, reloaded",
        "tensor parallel",
        "saved by the ranks",
        "expert parallel",
    ]
    assert all(result.difference <= 1e-5 for result in probe.patched)
    held = {result.mode: result.held for result in probe.patched}
    assert held["tensor parallel"] < 0.7
    assert held["one process, reloaded"] == 1
    assert "computes what it does in one process" in probe.verdict
    assert patchlab.get_patch_mapping() == {}


def test_model_that_does_not_run_on_tokens_is_told_before_any_rank_is_started(monkeypatch):
    def started(*words, **options):
        pytest.fail("no rank is needed to find out")

    monkeypatch.setattr(probe_module, "run_ranks", started)
    example = EXAMPLES / "normed_mlp.py"

    with pytest.raises(TargetError, match="ViTModel of the shrunken ViTConfig does not run on tok"):
        probe_parallel(example, "vit")

    # Guards the above: one that does run comes as far as the ranks.
    with pytest.raises(pytest.fail.Exception, match="no rank is needed"):
        probe_parallel(example, "llama")


def test_norm_over_what_is_split_is_found_silently_wrong(capsys):
    status = main(["-p", str(EXAMPLES / "normed_mlp.py"), "--model-type", "llama", "--modes", "tp"])

    shown = capsys.readouterr().out
    assert status == 1
    assert "silently computes something else (tensor parallel)" in shown
    assert shown.count(" same") == 3
    assert shown.count(" differs") == 1
    assert "hidden.pow(2).mean(-1, keepdim=True)" in shown


def test_count_of_heads_is_named_and_not_only_a_shape():
    probe = probe_parallel(EXAMPLES / "counted_heads.py", "llama")

    assert not probe.ok
    assert verdicts(probe, "unpatched") == {
        "one process, reloaded": "same",
        "tensor parallel": "same",
    }
    assert verdicts(probe) == {
        "one process, reloaded": "same",
        "tensor parallel": "fails",
        "saved by the ranks": "not run",
    }
    assert "counted_heads.py, line 16, in forward" in probe.patched[1].message
    (finding,) = (finding for finding in probe.findings if finding.code == "PL501")
    assert "self.config.num_attention_heads" in finding.message
    assert "-1" in finding.message


def test_misspelled_key_is_told_and_nothing_is_said_to_be_the_same(tmp_path, capsys):
    path = tmp_path / "patches.py"
    path.write_text((EXAMPLES / "normed_mlp.py").read_text().replace('"LlamaMLP"', '"LlamaMPL"'))
    assert "LlamaMPL" in path.read_text()

    status = main(["-p", str(path), "--model-type", "llama", "--modes", "tp"])

    shown = capsys.readouterr().out
    assert status == 1
    assert "nothing is replaced in it, so nothing was probed" in shown
    rows = [line for line in shown.splitlines() if " patched " in line]
    assert [line.split()[-2:] for line in rows] == [["not", "run"]] * 2
    assert re.search("PL104 .*'LlamaMPL' replaced no module.*Did you mean 'LlamaMLP'", shown)


def test_plan_of_a_finding_is_said_to_be_an_option_here(monkeypatch, capsys):
    found = [Finding("PL501", "info", "a", "b", "Pass DistributedConfig(tp_plan={'x': 'y'}).")]
    for findings, told in ((found, 1), ([], 0)):
        probe = probe_module.ParallelProbe("Model", 2, 1e-5, (), {"a": 1}, tuple(findings))
        monkeypatch.setattr(probe_command, "probe_parallel", lambda *_, p=probe, **__: p)
        main(["-p", "x.py", "--model-type", "llama"])
        assert capsys.readouterr().out.count("give it to --tp-plan as JSON") == told


# What is refused before anything is started


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"ranks": 1}, LaunchError, "Give 2 or more"),
        ({"modes": ("tensor",)}, LaunchError, "there are tp, save, ep"),
        ({"modes": ()}, LaunchError, "unknown mode"),
        ({"patches": "nowhere.py"}, LaunchError, "no patch file 'nowhere.py'"),
        ({"config": "./nowhere"}, TargetError, "there is no './nowhere'"),
    ],
)
def test_what_cannot_be_probed_is_refused_at_the_door(changes, error, says):
    asked = {"patches": EXAMPLES / "normed_mlp.py", "config": "llama"} | changes

    with pytest.raises(error, match=says):
        probe_parallel(asked.pop("patches"), asked.pop("config"), **asked)


@pytest.mark.parametrize("plan", ["nowhere.json", "{", "[1]", '{"a": 1}'])
def test_plan_that_is_none_is_refused(plan):
    words = ["-p", "x.py", "--model-type", "llama", "--tp-plan", plan]

    with pytest.raises(LaunchError, match=r"--tp-plan .* Give auto, or such as '\{"):
        main(words)


def test_plan_is_read_from_a_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"model.layers.*.mlp.w1": "colwise"}')

    assert probe_command._plan(str(path)) == {"model.layers.*.mlp.w1": "colwise"}
