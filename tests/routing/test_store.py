"""Traces in files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from patchlab.errors import RoutingError
from patchlab.routing import RoutingTrace, record_routing, replay_routing
from tests.routing.families import output, tiny_model, tokens

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))


def recorded(family="qwen3_moe", **options):
    model = tiny_model(family)
    inputs = {**tokens(model), **options}
    with torch.no_grad(), record_routing(model) as trace:
        output(model, inputs)
    return trace


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "switch_transformers", "jetmoe"])
def test_what_is_loaded_is_what_was_saved(tmp_path, family):
    trace = recorded(family)

    trace.save(tmp_path / "trace.safetensors")
    loaded = RoutingTrace.load(tmp_path / "trace.safetensors")

    assert loaded.routers == trace.routers
    assert loaded.model_type == trace.model_type
    assert loaded.dense_layers == trace.dense_layers
    for fqn in trace.layers:
        assert torch.equal(loaded.indices[fqn], trace.indices[fqn])
        assert loaded.indices[fqn].dtype is trace.indices[fqn].dtype


def test_trace_equals_what_was_saved_and_no_other(tmp_path):
    model = tiny_model("qwen3_moe")
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with torch.no_grad(), record_routing(model) as trace:
        model(IDS, attention_mask=mask)
    trace.save(tmp_path / "trace.safetensors")
    loaded = RoutingTrace.load(tmp_path / "trace.safetensors")

    routes = trace.routes
    fqn, index = trace.layers[0], routes.indices[trace.layers[0]].clone()
    wider = RoutingTrace(replace(routes, indices={**routes.indices, fqn: index.long()}))
    (block,) = routes.blocks["model"]
    index[-1] = index[-1].flip(0)
    other_experts = RoutingTrace(replace(routes, indices={**routes.indices, fqn: index}))
    other_padding = RoutingTrace(
        replace(routes, blocks={"model": (replace(block, real=~block.real),)})
    )
    no_padding = RoutingTrace(replace(routes, blocks={"model": (replace(block, real=None),)}))
    deeper = RoutingTrace(replace(routes, num_layers=routes.num_layers + 1))

    assert loaded == trace
    assert wider == trace
    assert all(trace != one for one in [other_experts, other_padding, no_padding, deeper, "trace"])


def test_trace_has_no_hash_since_it_grows_while_it_is_recorded():
    with pytest.raises(TypeError, match="unhashable"):
        hash(recorded())


def test_padding_and_generation_are_kept(tmp_path):
    model = tiny_model("qwen3_moe")
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with torch.no_grad(), record_routing(model) as trace:
        sequences = model.generate(
            IDS, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    trace.save(tmp_path / "trace.safetensors")
    loaded = RoutingTrace.load(str(tmp_path / "trace.safetensors"))

    (block,) = loaded.blocks["model"]
    assert torch.equal(block.real, trace.blocks["model"][0].real)
    assert block.prompt == 8
    full = torch.cat([mask, torch.ones(2, 4, dtype=torch.int64)], dim=1)
    with torch.no_grad(), replay_routing(model, loaded), record_routing(model) as again:
        model(sequences, attention_mask=full)
    assert again.agreement(trace).ok


def test_file_says_what_it_is(tmp_path):
    recorded().save(tmp_path / "trace.safetensors")

    with safe_open(tmp_path / "trace.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "patchlab.routing_trace"
    assert metadata["version"] == "1"
    assert json.loads(metadata["header"])["model_type"] == "qwen3_moe"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.safetensors"]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(RoutingError, match="cannot be read"):
        RoutingTrace.load(path)
    torch.save(torch.ones(1), path)
    with pytest.raises(RoutingError, match="cannot be read"):
        RoutingTrace.load(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(RoutingError, match="no routing trace"):
        RoutingTrace.load(path)


def changed(path, *, metadata=None, tensors=None):
    with safe_open(path, framework="pt") as file:
        kept = file.metadata()
    save_file({**load_file(path), **(tensors or {})}, path, {**kept, **(metadata or {})})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"metadata": {"version": "2"}}, "version '2'"),
        ({"metadata": {"header": "{"}}, "do not go together"),
        ({"metadata": {"header": "{}"}}, "do not go together"),
        ({"tensors": {"experts.model.layers.0.mlp.gate": torch.ones(3, 2)}}, "do not go together"),
        (
            {"tensors": {"experts.model.layers.0.mlp.gate": torch.full((14, 2), 9)}},
            "expert 9, but there are 8",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, match):
    path = tmp_path / "trace.safetensors"
    recorded().save(path)
    changed(path, **change)

    with pytest.raises(RoutingError, match=match):
        RoutingTrace.load(path)


NUMBERS = [None, -2, 0, 1.5, 10**9, 10**30, "1", True, [], {}, float("nan")]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "place",
    [
        ("routers",),
        ("routers", 0),
        ("routers", 0, "fqn"),
        ("routers", 0, "num_experts"),
        ("routers", 0, "top_k"),
        ("routers", 0, "tokens"),
        ("routers", 0, "num_groups"),
        ("blocks",),
        ("blocks", "model"),
        ("blocks", "model", 0, "length"),
        ("num_layers",),
    ],
    ids=repr,
)
def test_headers_that_say_something_else_are_refused_before_they_cost_memory(
    tmp_path, place, value
):
    """10⁹ layers would be asked of the memory by `to_vllm`, and end the process."""
    path = tmp_path / "trace.safetensors"
    recorded().save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    holder = header
    for part in place[:-1]:
        holder = holder[part]
    holder[place[-1]] = value
    changed(path, metadata={"header": json.dumps(header)})
    if place == ("num_layers",) and value == 0:
        assert RoutingTrace.load(path).num_layers == 0  # A model may not say.
        return

    with pytest.raises(RoutingError, match="do not go together"):
        RoutingTrace.load(path)


def test_header_that_is_nested_too_deep_is_refused(tmp_path):
    path = tmp_path / "trace.safetensors"
    recorded().save(path)
    changed(path, metadata={"header": "[" * 100_000})

    with pytest.raises(RoutingError, match="do not go together"):
        RoutingTrace.load(path)


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "trace.safetensors"
    trace = recorded()
    trace.save(path)
    before = path.read_bytes()

    def fail(tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("patchlab.routing.store.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        trace.save(path)

    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["trace.safetensors"]
