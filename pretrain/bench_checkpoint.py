"""A rank of `bench checkpoint`: takes the parts of saving and verifying, and what the bare machine needs for the same.

The first save plans, so its wait is told apart; during the second one, which confirms the plan, memory is watched,
which takes as long as saving and so spoils its times. Then every round makes a step, so that the state is a new one,
and measures ours, plain, plain, ours: what drifts stands on both sides of the ratios. *Plain* writing is as many
processes as ours, each with one file of the same size, `write` and `fsync`, no digest; plain copying is a copy of as
many bytes out of the device's memory (on the CPU: within it); plain reading reads and digests the files with as many
threads. Times are those until the slowest rank is done, over a shared start. Files were just written: reading them
mostly finds the page cache, on both sides.
"""

import contextlib
import hashlib
import json
import os
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardwright.pretrain import checkpoint_integrity, checkpoint_store, plan, provenance, rank, summary
from shardwright.pretrain.folder import write_atomic
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.plan import Plan
from shardwright.pretrain.rank import RankContext

_CHUNK_BYTES = 1 << 22
_SAMPLE_SECONDS = 0.02


def measure(context: RankContext) -> int:
    """Measure as many rounds as the attempt asks for; rank 0 writes `result.json` into the attempt's folder."""
    from torch.distributed.distributed_c10d import _get_default_store

    from shardwright.pretrain.run import assemble

    loop, state = assemble(context)
    measurement = _Measurement(context, loop, _get_default_store())
    state, _ = loop.step(state)
    first, watched = measurement.save(state), measurement.save(state, watches=True)
    told: dict[str, Any] = {"first": first, "extra_memory_bytes": watched["extra_memory_bytes"]}
    rounds = []
    for _ in range(context.attempt.launch["steps"]):
        state, _ = loop.step(state)
        rounds.append(measurement.round(state))
    if context.environment.rank == 0:
        write_atomic(context.attempt.path / "result.json", json.dumps(told | {"rounds": rounds}))
    measurement.meet_all()
    return 0


class _Measurement:
    """What is measured in one rank; all ranks call every method together."""

    def __init__(self, context: RankContext, loop: Any, store: Any) -> None:
        from shardwright.parallel.mcore import shards

        self._context, self._engine, self._store = context, loop.engine, store
        self._saver = shards.Saver(loop.engine)
        self._rank, self._world = context.environment.rank, context.environment.world_size
        self._root, self._number = context.folder.checkpoints, 0

    def round(self, state: Any) -> dict[str, Any]:
        """Ours, plain, plain, ours; the mean of both of each kind."""
        ours = [self.save(state)]
        plain = [self._plain(ours[0]["files"]), self._plain(ours[0]["files"])]
        ours.append(self.save(state))
        found = {
            name: statistics.mean(each[name] for each in ours)
            for name in ours[0]
            if name not in ("files", "extra_memory_bytes")
        }
        return found | {name: statistics.mean(each[name] for each in plain) for name in plain[0]}

    def meet_all(self) -> None:
        """Wait for all ranks. Collective: barrier of the world's gloo group."""
        import torch.distributed as dist

        dist.barrier(group=self._engine.control_group)

    def _slowest(self, seconds: float) -> float:
        return float(max(self._everybodys(seconds)))

    def _everybodys(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, value, group=self._engine.control_group)
        return found

    def save(self, state: Any, *, watches: bool = False) -> dict[str, Any]:
        """One checkpoint by our writers, committed, verified and removed; `watches` memory, which spoils the times."""
        folder = self._root / f".writing_step_{state.step:08d}"
        if self._rank == 0:
            checkpoint_store.begin(self._root, state.step)
        with _Memory() if watches else contextlib.nullcontext() as memory:
            self.meet_all()
            began = time.monotonic()
            writers = self._saver.begin(folder)
            stalled = time.monotonic()
            writers.wait()
            done = time.monotonic()
            assert writers.failure() is None, writers.failure()
        waited, digesting = self._slowest(stalled - began), writers.seconds[1]
        own = writers.finish()
        began = time.monotonic()
        written = {name: told for part in self._everybodys(own) for name, told in part.items()}
        if self._rank == 0:
            content = state.to_json(self._engine.layout, self._context.attempt.number)
            checkpoint_store.commit(folder, content, written)
        self.meet_all()
        committed = time.monotonic()
        final = checkpoint_store.step_folder(self._root, state.step)
        self._number += 1
        name = f"integrity of save {self._number}"
        verdict = checkpoint_integrity.verify_together(
            final, _Renamed(self._store, name), self._rank, self._world, readers=self._readers()
        )
        assert not verdict.reasons, verdict.reasons
        read = self._read_plainly(final)
        self.meet_all()
        if self._rank == 0:
            shutil.rmtree(final)
        return {
            "bytes": verdict.num_bytes,
            "bytes_of_a_rank": max(sum(size for size, _ in part.values()) for part in self._everybodys(own)),
            "gather_seconds": waited,
            "write_seconds": self._slowest(done - stalled - digesting),
            "hash_seconds": self._slowest(digesting),
            "background_seconds": self._slowest(done - stalled),
            "commit_seconds": self._slowest(committed - began),
            "verify_seconds": self._slowest(verdict.seconds),
            "plain_read_seconds": read,
            "extra_memory_bytes": max(self._everybodys(memory.extra_bytes if memory else 0)),
            "files": [size for size, _ in own.values()],
        }

    def _plain(self, sizes: list[int]) -> dict[str, float]:
        """What the machine needs to copy and to write as many bytes as this rank has."""
        import torch

        tensor = torch.ones(max(1, sum(sizes)), dtype=torch.uint8, device=self._engine.device)
        self.meet_all()
        began = time.monotonic()
        copied = tensor.to("cpu", copy=True)
        copy_seconds = self._slowest(time.monotonic() - began)
        content = memoryview(copied.numpy())
        folder = self._root / ".writing_plain"
        folder.mkdir(exist_ok=True)
        self.meet_all()
        began = time.monotonic()
        pids = [_forked_writer(folder / f"{self._rank}_{number}", content[:size]) for number, size in enumerate(sizes)]
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0, "a plain writer failed"
        write_seconds = self._slowest(time.monotonic() - began)
        if self._rank == 0:
            shutil.rmtree(folder)
        self.meet_all()
        return {"copy_seconds": copy_seconds, "plain_write_seconds": write_seconds}

    def _readers(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self._context.environment.local_world_size)

    def _read_plainly(self, folder: Path) -> float:
        """Read and digest this rank's share of a checkpoint, with as many threads as verifying has."""
        sizes = {name: entry["bytes"] for name, entry in checkpoint_store.manifest(folder).items()}
        mine = checkpoint_integrity.share(sizes, self._world)[self._rank]
        self.meet_all()
        began = time.monotonic()
        with ThreadPoolExecutor(self._readers()) as pool:
            list(pool.map(_digest, [folder / name for name in mine]))
        return self._slowest(time.monotonic() - began)


class _Renamed:
    """A store whose keys begin with a name of their own, since a checkpoint of the same path is verified again."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def set(self, key: str, value: str, /) -> None:
        self._store.set(f"{self._name}/{key}", value)

    def get(self, key: str, /) -> bytes:
        content: bytes = self._store.get(f"{self._name}/{key}")
        return content


class _Memory:
    """How much more memory this rank and its writers take at most, shared pages counted once (Pss)."""

    def __enter__(self) -> "_Memory":
        self._before, self._most, self._stop = _resident_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return max(0, self._most - self._before)

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._most = max(self._most, _resident_bytes())


def _resident_bytes() -> int:
    """Of this process and its children."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    total = 0
    for pid in ("self", *children):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _forked_writer(path: Path, content: memoryview) -> int:
    """Write and sync one file in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with path.open("wb") as file:
            for start in range(0, len(content), _CHUNK_BYTES):
                file.write(content[start : start + _CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())
        code = 0
    finally:
        os._exit(code)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Medians over the rounds, what stands beside them, and what they are to be judged by."""
    rounds = result["rounds"]
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    found["stall_seconds"] = found["gather_seconds"] + found["commit_seconds"]
    return found | {
        "first_stall_seconds": result["first"]["gather_seconds"] + result["first"]["commit_seconds"],
        "extra_memory_bytes": result["extra_memory_bytes"],
        "stall / copy": found["stall_seconds"] / found["copy_seconds"],
        "write / plain write": found["plain_write_seconds"] / found["write_seconds"],
        "write and hash / plain write": found["plain_write_seconds"] / found["background_seconds"],
        "verify / plain read": found["plain_read_seconds"] / found["verify_seconds"],
    }


def as_json(planned: Plan, found: Machine, result: dict[str, Any]) -> dict[str, Any]:
    """All that was measured, and on what; plain JSON values."""
    measured, gathered = plan.as_json(planned), provenance.gather(found)
    return {
        "time": gathered["time"],
        "plan": {name: measured[name] for name in ("model", "layout", "precision")},
        "median": ratios(result),
        **result,
        "packages": gathered["packages"],
        "machine": gathered["machine"],
    }


def show(planned: Plan, result: dict[str, Any]) -> None:
    """Print parts and ratios for a person."""
    found = ratios(result)
    rows: list[tuple[str | float, ...]] = [
        ("", "seconds", "the machine", "seconds", "ratio"),
        ("training waits", found["stall_seconds"], "copies", found["copy_seconds"], found["stall / copy"]),
        ("  gather", found["gather_seconds"]),
        ("  commit", found["commit_seconds"]),
        ("  at the first save", found["first_stall_seconds"]),
        ("write", found["write_seconds"], "writes", found["plain_write_seconds"], found["write / plain write"]),
        ("hash", found["hash_seconds"]),
        ("write and hash", found["background_seconds"], "", "", found["write and hash / plain write"]),
        (
            "verify",
            found["verify_seconds"],
            "reads, digests",
            found["plain_read_seconds"],
            found["verify / plain read"],
        ),
    ]
    cells = [[cell if isinstance(cell, str) else f"{cell:.3f}" for cell in row] + [""] * (5 - len(row)) for row in rows]
    print(
        f"{planned.layout.world_size} ranks, {summary.size(found['bytes'])}, medians of {len(result['rounds'])} rounds"
    )
    print(summary.columns(cells))
    extra, own = summary.size(found["extra_memory_bytes"]), summary.size(found["bytes_of_a_rank"])
    print(f"extra memory of a rank at most {extra}, for the {own} that it writes")


if __name__ == "__main__":
    rank.main(measure)
