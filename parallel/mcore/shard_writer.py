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
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat, _write_item

_CHUNK_BYTES = 1 << 22
"""Digested and written in turns, so that the second finds them in the processor's cache."""
_FLUSH_BYTES = 1 << 25
"""So much is written before the disk is told to begin with it."""
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
    """For all of it."""
    digest_seconds: float
    """Of these the digest's."""
    error: str | None


class _Digested:
    """A file that digests what is written into it, which torch does from front to back.

    The disk gets what is written at once, so that it works during digests too and little is left for the sync.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self._begun = 0  # so many bytes are on their way to the disk
        self.digest_seconds = 0.0
        self.error: OSError | None = None
        """Why a write failed; torch raises something else, about the position that it then does not find."""

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            began = time.monotonic()
            self._digest.update(chunk)
            self.digest_seconds += time.monotonic() - began
            try:
                self._file.write(chunk)
            except OSError as error:
                self.error = error
                raise
            if (end := self._file.tell()) - self._begun >= _FLUSH_BYTES:
                # Linux begins to write out what is dirty there, and returns
                os.posix_fadvise(self._file.fileno(), self._begun, end - self._begun, os.POSIX_FADV_DONTNEED)
                self._begun = end
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


class _Uncopied(FileSystemWriterAsync):  # type: ignore[misc]
    """Decides what goes into which file, and leaves tensors where they are: megatron-core's copies those of the CPU.

    Source: megatron-core 0.19.2, dist_checkpointing/strategies/filesystem_async.py:114.
    """

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Set what this rank writes: for every file its path, its name, and objects and tensors."""
        self.write_buckets: list[Any] = []
        for items in filter(None, filesystem_async._split_by_size_and_type(self.thread_count, plan.items)):
            objects: list[Any] = []
            tensors: list[Any] = []
            for item in items:
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    # a quantized one of a GPU; others of its kind cannot leave it
                    data = data.dequantize() if "dequantize" in type(data).__dict__ else data.detach()
                    tensors.append((item, data))
                else:
                    objects.append((item, data))
            name = f"{plan.storage_data.prefix}{len(self.write_buckets)}{DEFAULT_SUFFIX}"
            self.write_buckets.append((str(Path(self.checkpoint_dir) / name), name, (objects, tensors)))
        self.results_queue = filesystem_async._results_queue if self.write_buckets else None


class ShardWriters:
    """The processes that write this rank's files of one checkpoint.

    Args:
        plan: makes megatron-core's request; collective.
    """

    def __init__(self, plan: Callable[[], Any]) -> None:
        self._results = _Results()
        filesystem_async._results_queue = self._results  # instead of a process that would hold a queue
        filesystem_async.FileSystemWriterAsync = _Uncopied
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
    def seconds(self) -> tuple[float, float]:
        """How long the slowest file took: writing and syncing, and digesting."""
        slowest = max(self._written, key=lambda each: each.seconds, default=None)
        return (slowest.seconds - slowest.digest_seconds, slowest.digest_seconds) if slowest else (0.0, 0.0)

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
            self._written.append(Written(name, 0, "", [], 0.0, 0.0, error))


def _open_soon(path: Path) -> BinaryIO:
    """A new file; its folder, which rank 0 has made, may be seen late on another machine."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.open("wb")


def _alone(data: Any) -> Any:
    """The same numbers as a tensor that owns all the memory that it lies in: torch writes all of that."""
    if not isinstance(data, torch.Tensor) or data.untyped_storage().nbytes() == data.nbytes:
        return data
    if not data.is_contiguous() or not data.numel():
        return data.clone()
    content = data.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(content, dtype=data.dtype).view(data.shape)


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
        with _open_soon(Path(path)) as file, torch._C.DisableTorchFunction():
            stream = _Digested(file)
            for item, data in (*objects, *tensors):
                results.append(
                    _write_item(transforms, stream, _alone(data), item, name, SerializationFormat.TORCH_SAVE)
                )
            file.flush()
            os.fsync(file.fileno())
            digest, num_bytes = stream.hexdigest(), file.tell()
    except Exception as failure:
        traceback.print_exc()
        error = str((stream and stream.error) or failure)
    digest_seconds = stream.digest_seconds if stream else 0.0
    written = Written(name, num_bytes, digest, results, time.monotonic() - started, digest_seconds, error)
    with os.fdopen(shared, "wb") as left:
        left.write(pickle.dumps(written))
