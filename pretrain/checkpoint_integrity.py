"""Are the bytes of a checkpoint what was written? Compared with the digests before anything of it is opened.

Every rank reads its share of the files, several at once, and the ranks agree through the store in which they meet:
whatever one of them finds is the verdict of all, so nobody goes on alone and nobody waits for a collective that a
failed rank never enters. That is before any process group exists, since the data are prepared in between.

No torch here: `shardwright checkpoint verify` is the same check by one process.
"""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from shardwright.pretrain import checkpoint_store

PATIENCE_SECONDS = 10.0
"""How long a file may be missing or short before it counts: another machine may see a shared disk late."""
MAX_READERS = 8
"""Files that one rank reads at once."""


class Store(Protocol):
    """What is needed of torch's store; `get` waits until somebody has set the key."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key for all ranks."""

    def get(self, key: str, /) -> bytes:
        """The value, waiting for it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks found in one checkpoint; equal on all of them."""

    reasons: tuple[str, ...]
    """What is damaged; empty where every byte is as written."""
    num_bytes: int
    seconds: float
    """Until the last rank had read its share."""


def verify(path: Path, patience_seconds: float = 0.0) -> Verdict:
    """Compare all of a checkpoint in this process."""
    started = time.monotonic()
    reasons, num_bytes = _compare(path, 0, 1, patience_seconds, len(os.sched_getaffinity(0)))
    return Verdict(tuple(reasons), num_bytes, time.monotonic() - started)


def verify_together(
    path: Path, store: Store, rank: int, world: int, *, readers: int, patience_seconds: float = PATIENCE_SECONDS
) -> Verdict:
    """Compare a checkpoint, each rank its share.

    Args:
        path: folder of the checkpoint; the same on all ranks.
        store: where the ranks meet.
        rank: this one.
        world: number of ranks.
        readers: files that this rank may read at once.
        patience_seconds: how long to wait for a file that is not there yet.

    Collective: every rank calls it, with the same path; no process group is needed.
    """
    started = time.monotonic()
    key = f"integrity/{path}"
    store.set(f"{key}/{rank}", json.dumps(_compare(path, rank, world, patience_seconds, readers)))
    if rank == 0:
        parts = [json.loads(store.get(f"{key}/{other}")) for other in range(world)]
        reasons = list(dict.fromkeys(reason for part, _ in parts for reason in part))
        told = [reasons, sum(num_bytes for _, num_bytes in parts), time.monotonic() - started]
        store.set(f"{key}/verdict", json.dumps(told))
    reasons, num_bytes, seconds = json.loads(store.get(f"{key}/verdict"))
    return Verdict(tuple(reasons), num_bytes, seconds)


def _compare(path: Path, rank: int, world: int, patience_seconds: float, readers: int) -> tuple[list[str], int]:
    """What is damaged in a rank's share, and how many bytes that has."""
    deadline = time.monotonic() + patience_seconds
    while (reason := checkpoint_store.damage(path)) is not None and time.monotonic() < deadline:
        time.sleep(min(0.5, patience_seconds))
    if reason is not None:
        return [reason], 0
    listed = checkpoint_store.manifest(path)
    sizes = {name: entry["bytes"] for name, entry in listed.items()}
    mine = share(sizes, world)[rank]
    with ThreadPoolExecutor(max(1, min(readers, MAX_READERS))) as pool:
        found = pool.map(partial(_difference, path), mine, [listed[name]["sha256"] for name in mine])
    return [reason for reason in found if reason], sum(sizes[name] for name in mine)


def share(sizes: dict[str, int], world: int) -> list[Sequence[str]]:
    """Names of files for every rank, about as many bytes each: the largest first, to whom has least."""
    shares: list[list[str]] = [[] for _ in range(world)]
    loads = [0] * world
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += sizes[name]
    return list(shares)


def _difference(path: Path, name: str, expected: str) -> str | None:
    try:
        digest = checkpoint_store.sha256(path / name)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if digest == expected else f"{name} has other content than was written (SHA-256 differs)"
