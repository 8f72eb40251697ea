"""Writing one rank's shards beside training: forked processes, one a file, that digest what they write.

megatron-core plans a save and returns a request: which tensors of this rank go into which file, how they come into
host memory, and what is to be done once all ranks have written (`dist_checkpointing.save(async_sharded_save=True)`).
Here the request is carried out, in place of megatron-core's own callers, because those write one file of a rank before
they begin with the others, report errors of a writer as "incomplete results", and would need a second pass over all
bytes for their digests. Source: megatron-core 0.19.2, dist_checkpointing/strategies/filesystem_async.py:231.

A fork is the copy: what the forked process sees of host memory does not change when training goes on. It touches
neither CUDA nor process groups, writes its file, syncs it, and leaves results and digest in memory that it shares with
its parent.
"""

import gc
import hashlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

_CHUNK_BYTES = 1 << 22
"""Digested and written in turns, so that the second finds them in the processor's cache."""
_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""They ask the rank to save and stop; who is writing for it goes on."""
SEEN_SECONDS = 60.0
"""How long a folder that rank 0 has made may take to be seen by a rank on another machine."""
NICENESS = 5
"""Training comes first where writers compete with it for cores."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one writer left."""

    name: str
    num_bytes: int
    sha256: str
    results: list[Any]
    """torch's: where in the file each tensor lies."""
    seconds: float
    error: str | None


class _Digested:
    """A file that digests what is written into it, which torch does from front to back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.error: OSError | None = None
        """Why a write failed; torch raises something else, about the position that it then does not find."""

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._digest.update(chunk)
            try:
                self._file.write(chunk)
            except OSError as error:
                self.error = error
                raise
        return len(view)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Nothing: many tensors are written one after another."""

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class _Results:
    """Where megatron-core looks for what the writers of this rank did, once it has to write `.metadata`."""

    def __init__(self) -> None:
        self.by_writer: dict[int, list[Any]] = {}

    def get_nowait(self) -> dict[int, list[Any]]:
        return self.by_writer


class ShardWriters:
    """The processes that write this rank's files of one checkpoint.

    Args:
        plan: makes megatron-core's request; collective.
    """

    def __init__(self, plan: Callable[[], Any]) -> None:
        self._results = _Results()
        filesystem_async._results_queue = self._results  # instead of a process that would hold a queue
        self._request = plan()
        self._writers: dict[int, tuple[str, int]] = {}  # process -> name of its file, descriptor of what it leaves
        self._written: list[Written] = []
        if self._request.async_fn is None:  # nothing falls to this rank
            return
        (transforms,) = self._request.async_fn.args[0]  # of megatron-core's write_preloaded_data_multithread
        buckets = self._request.preload_fn()
        for bucket in buckets:
            self._start(bucket, transforms)

    def _start(self, bucket: Any, transforms: Any) -> None:
        shared = os.memfd_create("shard_writer")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        process = os.fork()
        if process == 0:
            try:
                _write(bucket, transforms, shared)
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._writers[process] = (bucket[1], shared)

    def done(self) -> bool:
        """Whether all of this rank's files are on disk, or have failed."""
        for process in list(self._writers):
            self._collect(process, os.WNOHANG)
        return not self._writers

    def wait(self) -> None:
        """Return when they are."""
        for process in list(self._writers):
            self._collect(process, 0)

    def failure(self) -> str | None:
        """What went wrong in the first writer that failed; None as long as none has."""
        return next((f"{each.name}: {each.error}" for each in self._written if each.error), None)

    @property
    def seconds(self) -> float:
        """How long the slowest file took: writing, digesting and syncing."""
        return max((each.seconds for each in self._written), default=0.0)

    def finish(self) -> dict[str, tuple[int, str]]:
        """Let megatron-core complete the checkpoint's folder, after all writers of all ranks have ended well.

        Returns:
            Bytes and SHA-256 of this rank's files.

        Collective: every rank calls it.
        """
        assert not self._writers and self.failure() is None
        self._results.by_writer.update(enumerate(each.results for each in self._written))
        for complete in self._request.finalize_fns:
            complete()
        return {each.name: (each.num_bytes, each.sha256) for each in self._written}

    def _collect(self, process: int, flags: int) -> None:
        ended, status = os.waitpid(process, flags)
        if ended == 0:
            return
        name, shared = self._writers.pop(process)
        with os.fdopen(shared, "rb") as left:
            left.seek(0)
            content = left.read()
        if content:
            self._written.append(pickle.loads(content))  # of our own fork, never of a file
        else:
            error = f"its writer ended with {os.waitstatus_to_exitcode(status)}"
            self._written.append(Written(name, 0, "", [], 0.0, error))


def _open_soon(path: Path) -> BinaryIO:
    """A new file; its folder, which rank 0 has made, may be seen late on another machine."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.open("wb")


def _write(bucket: Any, transforms: Any, shared: int) -> None:
    """The life of a forked process: one file."""
    gc.disable()  # a collection could free what belongs to CUDA
    torch.set_num_threads(1)  # the parent's pool of threads is not here
    torch.serialization.set_crc32_options(False)  # of every tensor; there is a SHA-256 of the file
    os.nice(NICENESS)
    started = time.monotonic()
    path, name, (objects, tensors) = bucket
    results, digest, num_bytes, error = [], "", 0, None
    stream: Any = None
    try:
        with _open_soon(Path(path)) as file:
            stream = _Digested(file)
            for item, data in (*objects, *tensors):
                results.append(_write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE))
            file.flush()
            os.fsync(file.fileno())
            digest, num_bytes = stream.hexdigest(), file.tell()
    except Exception as failure:
        traceback.print_exc()
        error = str((stream and stream.error) or failure)
    written = Written(name, num_bytes, digest, results, time.monotonic() - started, error)
    with os.fdopen(shared, "wb") as left:
        left.write(pickle.dumps(written))
