"""Checkpoint headers: names, shapes and types of the tensors in safetensors files, none read.

A safetensors file begins with eight bytes, the length of a JSON header that follows; the data comes
after it (safetensors format, version 0.4 and later). Only headers are read, so a checkpoint of a
terabyte costs as many small reads as it has files.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from patchlab.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin.index.json")
_FOREIGN = {
    ".gguf": "a GGUF file, which transformers reads with from_pretrained(folder, gguf_file=name)",
    ".h5": "a TensorFlow checkpoint, which transformers 4 was the last to read",
    ".msgpack": "a Flax checkpoint, which transformers 4 was the last to read",
}
# As safetensors itself has it: a longer header is no header.
_MAX_HEADER = 100_000_000
_MANY_SHARDS = 32
_SHORT = (str, Path, int, float, bool, type(None))
_DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        shape: Its sizes.
        dtype: As safetensors names it, "BF16".
        file: The name of the file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def nbytes(self) -> int:
        """Its size in the file, rounded up."""
        count = 1
        for size in self.shape:
            count *= size
        return -(-count * _DTYPE_BITS.get(self.dtype, 8) // 8)


@dataclass(frozen=True, eq=False, slots=True)
class StoredCheckpoint:
    """What the headers of a checkpoint say.

    Attributes:
        tensors: Key → tensor, in the order of the files.
        files: The files.
        config: The config.json beside them, None if there is none.
    """

    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]
    config: Path | None = None


def read_checkpoint(checkpoint: str | Path) -> StoredCheckpoint:
    """Read the headers of a checkpoint.

    Args:
        checkpoint: A safetensors file, its index, a folder that holds either, or the id of a model
            in the local cache. Nothing is downloaded.

    Raises:
        CheckpointError: There is none, it is a pickle or of another format, or it is damaged.
    """
    if not isinstance(checkpoint, str | Path) or not str(checkpoint).strip():
        # Not the value of a model or of a state dict, which has thousands of lines.
        what = repr(checkpoint) if isinstance(checkpoint, _SHORT) else type(checkpoint).__name__
        in_memory = isinstance(checkpoint, Mapping) or hasattr(checkpoint, "state_dict")
        hint = (
            " What is in memory is one after model.save_pretrained(folder), or "
            "safetensors.torch.save_file(state_dict, file)."
        )
        if isinstance(checkpoint, Mapping) and all(
            isinstance(v, type) for v in checkpoint.values()
        ):
            hint = (
                " A mapping of keys to classes comes after it: "
                "check_checkpoint(target, folder, mapping)."
            )
        raise CheckpointError(
            f"{what} is no checkpoint. Give a safetensors file, a folder that holds "
            f"{SINGLE} or {INDEX}, or the id of a model in the local cache.{hint * in_memory}"
        )
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_single(path)
    found = _cached(str(checkpoint))
    if found is None:
        raise CheckpointError(
            f"no checkpoint at {str(checkpoint)!r}: it is no file, no folder, and no model of that "
            f"id has its safetensors files in the local cache. Nothing is downloaded here; give a "
            f"folder that holds {SINGLE} or {INDEX}."
        )
    return _read_folder(found)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of one safetensors file.

    Raises:
        CheckpointError: The file is no safetensors file, or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(
                    f"{path} is no safetensors file: it has {len(start)} bytes. Fetch it again."
                )
            (length,) = struct.unpack("<Q", start)
            size = path.stat().st_size
            if length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path} is no safetensors file, or is cut off: its header would have {length} "
                    f"bytes, the file has {size}. Fetch it again."
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Give a file that this process may read."
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"the header of {path} is no JSON: {error}. Fetch it again."
        ) from error
    tensors: dict[str, StoredTensor] = {}
    places: list[tuple[int, int]] = []
    try:
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            tensors[key], place = _read_entry(key, entry, path.name)
            places.append(place)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the header of {path} is not as safetensors writes it: {error!r}. Fetch it again."
        ) from error
    # As safetensors has it: the tensors lie one after the other, and fill the file to its end.
    end = 0
    for begin, stop in sorted(places):
        if begin != end:
            raise CheckpointError(
                f"the header of {path} is not as safetensors writes it: a tensor begins at "
                f"{begin}, and the one before it ends at {end}. Fetch it again."
            )
        end = stop
    if 8 + length + end != size:
        more = "is cut off" if 8 + length + end > size else "is damaged"
        raise CheckpointError(
            f"{path} {more}: its header speaks of {8 + length + end} bytes, the file has {size}. "
            f"Fetch it again."
        )
    return tensors


def _read_entry(key: str, entry: Any, file: str) -> tuple[StoredTensor, tuple[int, int]]:
    """Read one tensor of a header; raises what a damaged one gives rise to."""
    begin, stop = entry["data_offsets"]
    shape, dtype = entry["shape"], entry["dtype"]
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"{key!r} has the shape {shape!r}")
    if type(begin) is not int or type(stop) is not int or not 0 <= begin <= stop:
        raise ValueError(f"{key!r} is said to lie from {begin!r} to {stop!r}")
    stored = StoredTensor(tuple(shape), str(dtype), file)
    if dtype in _DTYPE_BITS and stored.nbytes != stop - begin:
        raise ValueError(
            f"{key!r} is {dtype} of shape {shape}, {stored.nbytes} bytes, and has {stop - begin}"
        )
    return stored, (begin, stop)


def _read_folder(folder: Path) -> StoredCheckpoint:
    config = folder / "config.json"
    beside = config if config.is_file() else None
    if (folder / INDEX).is_file():
        found = _read_index(folder / INDEX)
    elif (folder / SINGLE).is_file():
        found = _read_single(folder / SINGLE)
    else:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        pickles = [name for name in names if name.endswith(_PICKLES)]
        foreign = [name for name in names if name.endswith(tuple(_FOREIGN))]
        others = [name for name in names if name.endswith(".safetensors")]
        if len(others) == 1:
            found = _read_single(folder / others[0])
        elif pickles and not others:
            raise _pickled(folder / pickles[0])
        elif foreign and not others:
            raise _unread(folder / foreign[0])
        else:
            what = f"It holds {', '.join(names[:6])}." if names else "It is empty."
            raise CheckpointError(
                f"{folder} holds neither {SINGLE} nor {INDEX}. {what} Give one of its files."
            )
    return StoredCheckpoint(found.tensors, found.files, beside)


def _read_single(path: Path) -> StoredCheckpoint:
    if path.name.endswith(_PICKLES):
        raise _pickled(path)
    if path.name.endswith(".json"):
        return _read_index(path)
    if not path.name.endswith(".safetensors"):
        raise _unread(path)
    return StoredCheckpoint(read_header(path), (path,))


def _read_index(path: Path) -> StoredCheckpoint:
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not names:
            raise ValueError("its 'weight_map' is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no index of a checkpoint: {error!r}. It should hold a 'weight_map' from "
            f"key to file."
        ) from error
    tensors: dict[str, StoredTensor] = {}
    files = []
    for name in tqdm(names, desc="Reading headers", unit="file", disable=len(names) < _MANY_SHARDS):
        # A name out of a file is a name in the folder, and never a way out of it.
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(
                f"{path} names the file {name!r}, which does not lie in its own folder."
            )
        shard = path.parent / name
        # Not `Path.is_file`, which raises of a name that is too long for the file system.
        if not os.path.isfile(shard):  # noqa: PTH113
            if name.endswith(_PICKLES):
                raise _pickled(shard)
            raise CheckpointError(f"{path} names {name!r}, and there is no such file. Fetch it.")
        tensors.update(read_header(shard))
        files.append(shard)
    lost = [key for key in weight_map if key not in tensors]
    if lost:
        raise CheckpointError(
            f"{path} says that {lost[0]!r} is in {weight_map[lost[0]]}, and it is not ("
            f"{len(lost)} such keys). The index and the files do not belong together. "
            f"Fetch the checkpoint again."
        )
    return StoredCheckpoint(
        {key: tensor for key, tensor in tensors.items() if key in weight_map}, tuple(files)
    )


def _cached(model_id: str) -> Path | None:
    """Return the folder of a model in the local cache, None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in (INDEX, SINGLE):
        try:
            found = try_to_load_from_cache(model_id, name)
        except (HFValidationError, ValueError):
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _unread(path: Path) -> CheckpointError:
    kind = next((told for suffix, told in _FOREIGN.items() if path.name.endswith(suffix)), "")
    return CheckpointError(
        f"{path} is {kind or 'no safetensors file, and only those are read here'}. Load it with "
        f"transformers and write it anew with model.save_pretrained(folder)."
    )


def _pickled(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which runs code when it is read, and has no header to read alone. "
        f"Convert it once where you trust it: load the model with transformers and write it with "
        f"model.save_pretrained(folder), which gives safetensors."
    )
