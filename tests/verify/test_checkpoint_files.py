"""Reading headers: what is refused, and that nothing but headers is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from patchlab.errors import CheckpointError
from patchlab.verify.checkpoint_files import INDEX, SINGLE, read_checkpoint, read_header


def write(path, name="a", shape=(2, 3), **changes):
    header = {name: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 24]}} | changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    return path


def test_header_says_what_safetensors_wrote(tmp_path):
    tensors = {
        "x": torch.zeros(2, 3, dtype=torch.bfloat16),
        "y": torch.zeros((), dtype=torch.int64),
        "z": torch.zeros(0, 4, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})

    read = read_checkpoint(tmp_path).tensors

    assert {key: stored.shape for key, stored in read.items()} == {
        key: tuple(tensor.shape) for key, tensor in tensors.items()
    }
    assert {key: stored.nbytes for key, stored in read.items()} == {
        key: tensor.nbytes for key, tensor in tensors.items()
    }


def test_index_brings_all_files_together(tmp_path):
    write(tmp_path / "one.safetensors", "a")
    write(tmp_path / "two.safetensors", "b")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    for place in (tmp_path, tmp_path / INDEX):
        found = read_checkpoint(place)
        assert {key: stored.file for key, stored in found.tensors.items()} == weight_map
        assert len(found.files) == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
@pytest.mark.parametrize("as_folder", [True, False])
def test_pickle_is_refused_with_the_way_out(tmp_path, name, as_folder):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")

    with pytest.raises(CheckpointError, match=r"is a pickle.*save_pretrained"):
        read_checkpoint(tmp_path if as_folder else tmp_path / name)

    assert not (tmp_path / "owned").exists()


def test_index_of_pickles_is_refused(tmp_path):
    weight_map = {"a": "pytorch_model-00001-of-00001.bin"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    with pytest.raises(CheckpointError, match="is a pickle"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", 3])
def test_index_cannot_name_a_file_elsewhere(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(CheckpointError, match="own folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it has 0 bytes. Fetch it again"),
        (b"\xff" * 8, "cut off"),
        (struct.pack("<Q", 4) + b"{]{]", "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "not as safetensors"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "not as safetensors"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "not as safetensors"),
    ],
)
def test_damaged_file_is_told_as_such(tmp_path, content, told):
    path = tmp_path / SINGLE
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=told):
        read_header(path)


def entry(dtype="F32", shape=(2,), begin=0, stop=8):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


@pytest.mark.parametrize(
    ("header", "size", "told"),
    [
        ({"a": entry(shape=[-1])}, 8, r"'a' has the shape \[-1\]"),
        ({"a": entry(shape=[2.0])}, 8, r"'a' has the shape \[2\.0\]"),
        ({"a": entry(shape=[True], stop=4)}, 4, r"'a' has the shape \[True\]"),
        ({"a": entry(shape="2")}, 8, "'a' has the shape '2'"),
        ({"a": entry(shape=[2**62, 4])}, 8, "and has 8"),
        ({"a": entry(shape=[3])}, 8, r"'a' is F32 of shape \[3\], 12 bytes, and has 8"),
        ({"a": entry(begin=0.0)}, 8, "is said to lie from 0.0 to 8"),
        ({"a": entry(begin=8, stop=0)}, 8, "is said to lie from 8 to 0"),
        ({"a": entry(begin=4, stop=12)}, 12, "begins at 4, and the one before it ends at 0"),
        ({"a": entry(), "b": entry(begin=4, stop=12)}, 12, "begins at 4, .* ends at 8"),
        ({"a": entry(), "b": entry(begin=12, stop=20)}, 20, "begins at 12, .* ends at 8"),
        ({"a": entry()}, 9, r"is damaged: its header speaks of \d+ bytes"),
    ],
)
def test_header_that_safetensors_refuses_is_refused(tmp_path, header, size, told):
    text = json.dumps(header).encode()
    path = tmp_path / SINGLE
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")

    with pytest.raises(CheckpointError, match=rf"{told}.*Fetch it again"):
        read_header(path)


def test_header_that_safetensors_takes_is_taken(tmp_path):
    """Guards the test above: the sound form of those headers."""
    header = {"b": entry(begin=8, stop=16), "a": entry()}
    text = json.dumps(header).encode()
    path = tmp_path / SINGLE
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))

    assert set(safe_open(path, "pt").keys()) == set(read_header(path)) == {"a", "b"}


def test_file_that_is_cut_off_at_any_place_is_refused(tmp_path):
    whole = write(tmp_path / SINGLE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SINGLE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(tmp_path / SINGLE)
    (tmp_path / SINGLE).write_bytes(whole)
    assert read_header(tmp_path / SINGLE)


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, "{}", "[]", '{"weight_map": {}}', '{"weight_map": null}', '{"weight_map": []}'],
    ids=["deep", "nothing", "list", "empty", "null", "no dict"],
)
def test_damaged_index_is_told_as_such(tmp_path, content):
    (tmp_path / INDEX).write_text(content)

    with pytest.raises(
        CheckpointError,
        match=r"no index of a checkpoint: .* hold a 'weight_map'",
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.gguf", r"GGUF.*gguf_file"),
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("pytorch_model.bin.index.json", "is a pickle"),
    ],
)
@pytest.mark.parametrize("as_folder", [True, False])
def test_other_format_is_named_with_the_way_out(tmp_path, name, told, as_folder):
    (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(CheckpointError, match=f"{told}.*save_pretrained"):
        read_checkpoint(tmp_path if as_folder else tmp_path / name)


@pytest.mark.parametrize("checkpoint", [3, b"model", None, "", " "])
def test_what_is_no_path_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        read_checkpoint(checkpoint)


def test_mapping_in_the_place_of_a_checkpoint_is_told_where_it_belongs():
    with pytest.raises(CheckpointError, match=r"check_checkpoint\(target, folder, mapping\)"):
        read_checkpoint({"LlamaMLP": dict})


def test_model_in_the_cache_is_read_through_its_links(tmp_path, monkeypatch):
    blobs, snapshot = tmp_path / "models--me--tiny/blobs", tmp_path / "models--me--tiny/snapshots/1"
    for folder in (blobs, snapshot, tmp_path / "models--me--tiny/refs"):
        folder.mkdir(parents=True)
    (tmp_path / "models--me--tiny/refs/main").write_text("1")
    write(blobs / "abc")
    (snapshot / SINGLE).symlink_to("../../blobs/abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert (
        set(read_checkpoint("me/tiny").tensors) == set(read_checkpoint(snapshot).tensors) == {"a"}
    )


def test_missing_shard_and_missing_key_are_told(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names 'one\.safetensors', and there is no such"):
        read_checkpoint(tmp_path)

    write(tmp_path / "one.safetensors", "other")
    with pytest.raises(
        CheckpointError, match=r"do not belong together\. Fetch the checkpoint again"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["nothing-here", "no/such/model-id", "bad id !!"])
def test_what_is_not_there_is_told(place):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        read_checkpoint(place)


def test_folder_without_weights_says_what_it_holds(tmp_path):
    with pytest.raises(CheckpointError, match="It is empty"):
        read_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"It holds notes\.txt"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"and only those are read here\. Load it with trans"):
        read_checkpoint(tmp_path / "notes.txt")


def test_folder_with_two_files_and_no_index_asks_for_one_of_them(tmp_path):
    for name in ("one.safetensors", "two.safetensors"):
        write(tmp_path / name)

    with pytest.raises(CheckpointError, match=r"two\.safetensors\. Give one of its files"):
        read_checkpoint(tmp_path)
    assert set(read_checkpoint(tmp_path / "two.safetensors").tensors) == {"a"}


@pytest.mark.parametrize("name", ["a" * 5000, "\ud800", "a\0b"])
def test_file_name_that_no_file_can_have_is_told(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))

    with pytest.raises(CheckpointError, match="there is no such file") as error:
        read_checkpoint(tmp_path)
    assert repr(name) in str(error.value)
    str(error.value).encode()  # Can be printed.
