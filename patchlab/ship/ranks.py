"""Ranks: whether every process of a distributed run has the same patches.

Registries are per process, so one rank with another file, another version of it, or none builds
another model, and nothing in a collective operation notices. Each rank is told apart by a digest of
what is registered: the keys, in order, and the source of the replacement classes and of what they
inherit outside of torch and transformers; and the conversions that patch files brought.

Digests go through a key-value store: that of the launching agent, which torchrun and
`accelerate launch` offer before a script has begun, or that of the process group. No collective
operation is needed, so it does not matter which devices a rank has, and whether they are set.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import inspect
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed

from patchlab.errors import LaunchError
from patchlab.mapping.registry import registered_entries
from patchlab.plan.wording import listed
from patchlab.ship.patch_file import registered_files

# Without its stores, and with nothing but `is_available`, in a torch built without it.
dist: Any = torch.distributed
TIMEOUT = datetime.timedelta(seconds=300)
_LIBRARIES = ("torch", "transformers", "builtins")
_HEAD_START = 1.0  # seconds
_round = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What is registered in one process of a run.

    Attributes:
        rank: Its rank, 0 outside of a distributed run.
        world_size: How many there are.
        host: The name of its machine.
        process: The id of the process.
        keys: What is registered, in order.
        digest: The first 12 hexadecimal digits of the digest of what is registered.
        classes: For each key the class, with its Python module.
        files: The patch files that were registered, each with the start of its digest.
    """

    rank: int
    world_size: int
    host: str
    process: int
    keys: tuple[str, ...]
    digest: str
    classes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        number = len(self.keys)
        registered = f"{number} registered ({listed(self.keys)})" if number else "not patched"
        return f"rank {self.rank} of {self.world_size} · {registered} · {self.digest}"

    @property
    def details(self) -> tuple[str, ...]:
        """A line for the files, and one for each key with its class."""
        files = (f"from {', '.join(self.files)}",) if self.files else ()
        pairs = zip(self.keys, self.classes, strict=False)
        return (*files, *(f"{key} → {name}" for key, name in pairs))


def rank_status() -> RankStatus:
    """Return what is registered in this process, with its rank as the launcher has set it."""
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = (
            int(os.environ.get(name) or n) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
        )
    entries = registered_entries()
    return RankStatus(
        rank,
        size,
        socket.gethostname(),
        os.getpid(),
        tuple(entry.key for entry in entries),
        registry_digest(),
        tuple(f"{e.replacement.__module__}.{e.replacement.__qualname__}" for e in entries),
        tuple(f"{file.path} ({file.digest[:8]})" for file in registered_files()),
    )


def registry_digest() -> str:
    """Return a digest of what is registered: equal patches of two processes have equal ones.

    Two processes may have the file in different folders, so paths and Python modules say nothing.
    """
    digest = hashlib.sha256()
    for entry in registered_entries():
        digest.update(f"{entry.key}\0{entry.replacement.__qualname__}\0".encode())
        for cls in entry.replacement.__mro__:
            if cls.__module__.partition(".")[0] not in _LIBRARIES:
                digest.update(f"{cls.__qualname__}\0{_source_of(cls)}\0".encode())
    # What a class calls beside itself, and the conversions, are in the text of the file.
    for file in registered_files():
        digest.update(file.digest.encode())
    return digest.hexdigest()[:12]


def check_ranks() -> tuple[RankStatus, ...]:
    """Compare what is registered between the ranks of the process group; every rank has to call it.

    Returns:
        The status of each rank, in order. That of this process alone if there is no process group.

    Raises:
        LaunchError: The ranks differ, or one of them did not call this within five minutes.
    """
    own = rank_status()
    if not (dist.is_available() and dist.is_initialized()) or own.world_size == 1:
        return (own,)
    global _round
    _round += 1
    from torch.distributed.distributed_c10d import _get_default_store

    return compare_through(own, dist.PrefixStore(f"patchlab/{_round}", _get_default_store()))


def check_ranks_of_agent() -> tuple[RankStatus, ...] | None:
    """Compare what is registered between ranks before there is a process group.

    Possible where the launcher offers its own store, as torchrun does; every rank has to call it.

    Returns:
        The status of each rank, None where no such store is offered.

    Raises:
        LaunchError: As `check_ranks` does.
    """
    own, env = rank_status(), os.environ
    if own.world_size == 1 or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        store = dist.TCPStore(
            env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=TIMEOUT
        )
    except (KeyError, ValueError, RuntimeError):
        return None  # the process group will say what is wrong with it, or have one of its own
    attempt = f"{env.get('TORCHELASTIC_RUN_ID')}/{env.get('TORCHELASTIC_RESTART_COUNT')}"
    return compare_through(own, dist.PrefixStore(f"patchlab/{attempt}", store))


@contextmanager
def checked_when_initialized() -> Iterator[None]:
    """Have ranks compared as soon as a process group is initialized inside the block, once.

    The three names under which `init_process_group` is called are bound to a function that does so;
    they have torch's own again after that, and when the block ends.
    """
    if not dist.is_available():
        yield
        return
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.distributed_c10d as distributed

    name = "init_process_group"
    real: Callable[..., Any] = getattr(distributed, name)
    homes = [home for home in (dist, distributed, device_mesh) if vars(home).get(name) is real]

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        put_back()
        result = real(*args, **kwargs)
        check_ranks()
        return result

    def put_back() -> None:
        for home in homes:
            if vars(home).get(name) is init_process_group:
                setattr(home, name, real)

    try:
        for home in homes:
            setattr(home, name, init_process_group)
        yield
    finally:
        put_back()


def compare_through(own: RankStatus, store: Any) -> tuple[RankStatus, ...]:
    """Exchange statuses through a store of `torch.distributed`; every rank has to call it.

    Args:
        own: The status of this rank.
        store: A store, or a part of one, that nobody else has used.

    Raises:
        LaunchError: As `check_ranks` does.
    """
    store.set(str(own.rank), json.dumps(asdict(own)))
    names = [str(rank) for rank in range(own.world_size)]
    try:
        store.wait(names, TIMEOUT)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {own.rank} waited {TIMEOUT.seconds} s for the other ranks to say which patches "
            f"they have. Start every rank with python -m patchlab run."
        ) from error
    found = [json.loads(store.get(name)) for name in names]
    statuses = tuple(_status_of(known) for known in found)
    store.add("read", 1)
    if len({status.digest for status in statuses}) > 1:
        what = "the ranks have different patches, so they would build different models"
        # The list once and not by every rank: a launcher shows the output of all of them together.
        if own.rank:
            # Launchers end all ranks as soon as one has ended, and rank 0 is to be heard.
            time.sleep(_HEAD_START)
            raise LaunchError(f"{what}. Rank 0 says which; this is {own} · {own.host}")
        _wait_for_readers(store, own.world_size)
        raise LaunchError(
            f"{what}:\n{_compared(statuses)}\n"
            f"Give every rank the same patch files, in the same order and version."
        )
    return statuses


def _compared(statuses: tuple[RankStatus, ...]) -> str:
    """Return a line for each rank, and below the first of each digest what it has in detail."""
    lines: list[str] = []
    told: set[str] = set()
    for status in statuses:
        lines.append(f"  {status} · {status.host}")
        if status.digest not in told:
            lines += [f"    {detail}" for detail in status.details]
        told.add(status.digest)
    return "\n".join(lines)


def _status_of(known: dict[str, Any]) -> RankStatus:
    # JSON has no tuples.
    lists = {name: tuple(known[name]) for name in ("keys", "classes", "files")}
    return RankStatus(**(known | lists))


def _wait_for_readers(store: Any, number: int) -> None:
    """Wait until every rank has read: the first one may keep the store, and is about to leave."""
    give_up = time.monotonic() + 10
    while store.add("read", 0) < number and time.monotonic() < give_up:
        time.sleep(0.05)


def _source_of(cls: type) -> str:
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(cls)
    # A class of a cell or of `exec`: its methods have a source, or their code does.
    parts = []
    for name, value in sorted(vars(cls).items()):
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        if code is not None:
            plain = [const for const in code.co_consts if isinstance(const, str | int | float)]
            parts.append(f"{name}\0{code.co_code.hex()}\0{code.co_names}\0{plain}")
    return "\0".join(parts)
