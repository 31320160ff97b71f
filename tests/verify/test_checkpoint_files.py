"""Reading headers: what is refused, and that nothing but headers is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
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
        (b"", "0 bytes"),
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


def test_file_that_is_cut_off_at_any_place_is_refused(tmp_path):
    whole = write(tmp_path / SINGLE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SINGLE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(tmp_path / SINGLE)
    (tmp_path / SINGLE).write_bytes(whole)
    assert read_header(tmp_path / SINGLE)


def test_missing_shard_and_missing_key_are_told(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names one\.safetensors, and there is no such"):
        read_checkpoint(tmp_path)

    write(tmp_path / "one.safetensors", "other")
    with pytest.raises(CheckpointError, match="do not belong together"):
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
