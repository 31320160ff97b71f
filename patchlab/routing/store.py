"""Store: routing traces in safetensors files, with a header that says what is in them.

One tensor for each router (`experts.<FQN>`) and each padding mask; the header is JSON in the file's
metadata and names its version. Nothing is executed on reading, and nothing is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from patchlab.errors import RoutingError
from patchlab.routing.header import routes_of
from patchlab.routing.trace import RoutingTrace

FORMAT = "patchlab.routing_trace"
VERSION = 1


def save_trace(trace: RoutingTrace, path: str | Path) -> None:
    """Write a trace to a file, replacing one that is there once the new one is complete.

    Raises:
        RoutingError: The file cannot be written, as where there is no such folder.
        OSError: The same, if the system says so first.
    """
    path = Path(path)
    routes = trace.routes
    tensors = {f"experts.{fqn}": index.contiguous() for fqn, index in routes.indices.items()}
    blocks: dict[str, list[dict[str, Any]]] = {}
    for key, group in routes.blocks.items():
        blocks[key] = []
        for number, block in enumerate(group):
            mask = None
            if block.real is not None:
                mask = f"real.{key}.{number}"
                tensors[mask] = block.real.contiguous()
            blocks[key].append(
                {
                    "batch_size": block.batch_size,
                    "length": block.length,
                    "prompt": block.prompt,
                    "is_flat": block.is_flat,
                    "real": mask,
                }
            )
    header = {
        "routers": [asdict(router) for router in routes.routers],
        "blocks": blocks,
        "model_type": routes.model_type,
        "num_layers": routes.num_layers,
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "header": json.dumps(header, sort_keys=True),
    }
    partial = path.with_name(path.name + ".partial")
    try:
        # Copies, since routers share storage and safetensors refuses shared tensors.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial, metadata)
        partial.replace(path)
    except SafetensorError as error:
        raise RoutingError(f"the trace cannot be written to {str(path)!r}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load_trace(path: str | Path) -> RoutingTrace:
    """Read a trace.

    Raises:
        RoutingError: The file is not there, is no safetensors file, is no trace, is of a newer
            version, or holds what a header of its version does not describe.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RoutingError(
            f"{str(path)!r} cannot be read as a safetensors file: {error}"
        ) from error
    if metadata.get("format") != FORMAT:
        raise RoutingError(
            f"{str(path)!r} is a safetensors file but no routing trace: its format is "
            f"{metadata.get('format')!r}, expected {FORMAT!r}."
        )
    if metadata.get("version") != str(VERSION):
        raise RoutingError(
            f"{str(path)!r} is a routing trace of version {metadata.get('version')!r}; this "
            f"patchlab reads version {VERSION}. Write it again, or update patchlab."
        )
    try:
        routes = routes_of(json.loads(metadata.get("header", "")), tensors)
    except (ValueError, RecursionError) as error:
        raise RoutingError(
            f"{str(path)!r} is a routing trace whose header and tensors do not go together: {error}"
        ) from error
    return RoutingTrace(routes)
