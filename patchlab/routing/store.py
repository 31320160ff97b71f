"""Store: routing traces in safetensors files, with a header that says what is in them.

One tensor for each router (`experts.<FQN>`) and each padding mask; the header is JSON in the file's
metadata and names its version. Nothing is executed on reading, and nothing is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from patchlab.errors import RoutingError
from patchlab.routing.fit import check_routes
from patchlab.routing.trace import Router, Routes, RoutingTrace, TokenBlock

FORMAT = "patchlab.routing_trace"
VERSION = 1


def save_trace(trace: RoutingTrace, path: str | Path) -> None:
    """Write a trace to a file, replacing one that is there once the new one is complete."""
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
        routes = _routes(json.loads(metadata["header"]), tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RoutingError(
            f"{str(path)!r} is a routing trace whose header and tensors do not go together: {error}"
        ) from error
    return RoutingTrace(routes)


def _routes(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Routes:
    routers = tuple(Router(**router) for router in header["routers"])
    blocks = {}
    for key, group in header["blocks"].items():
        blocks[key] = tuple(
            TokenBlock(
                block["batch_size"],
                block["length"],
                real=None if block["real"] is None else tensors[block["real"]].to(torch.bool),
                prompt=block["prompt"],
                is_flat=block["is_flat"],
            )
            for block in group
        )
    indices = {router.fqn: tensors[f"experts.{router.fqn}"] for router in routers}
    for router in routers:
        expected = sum(block.num_tokens for block in blocks[router.tokens])
        index = indices[router.fqn]
        if index.is_floating_point() or len(index) != expected:
            raise ValueError(
                f"{router.fqn} has {len(index)} rows of {index.dtype}, the header says {expected} "
                f"tokens"
            )
    routes = Routes(routers, indices, blocks, str(header["model_type"]), int(header["num_layers"]))
    check_routes(routes)
    return routes
