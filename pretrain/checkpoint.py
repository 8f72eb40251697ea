"""Saving a run: shards by all ranks, policy by rank 0, at most one checkpoint in the making.

With `checkpoint.async_save` training waits for the copy into host memory alone. The files are then written by other
processes, and the step after the last rank's last file is on disk commits the checkpoint: manifest, marker, one rename.
Without it the same is done in one go. Either way nothing counts before the rename, so a kill in between costs the steps
since the checkpoint before, and that one is removed only after the commit.
"""

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine
from shardwright.parallel.mcore.shard_writer import ShardWriters
from shardwright.pretrain import checkpoint_store, plan, provenance, summary
from shardwright.pretrain.events import EventLog, now
from shardwright.pretrain.faults import TrainingFault
from shardwright.pretrain.folder import Attempt, Fence
from shardwright.pretrain.trainer_state import TrainerState

IDLE, WRITING, FAILED = 0, 1, 2
"""How it stands on one rank; of several ranks the largest counts."""


@dataclass(slots=True)
class _Pending:
    """A checkpoint in the making."""

    state: TrainerState
    validation_loss: float | None
    folder: Path
    writers: ShardWriters
    began: float
    gather_seconds: float
    stall_seconds: float
    """How long training has waited for it."""


class Checkpoints:
    """Saves the checkpoints of one run.

    Args:
        engine: what is saved.
        root: the run's folder of checkpoints.
        attempt: whose configuration goes into them.
        events: told of every one.
        fence: asked by rank 0 before it begins and before it commits, whether the run's folder is still this run's.
    """

    def __init__(self, engine: Engine, root: Path, attempt: Attempt, events: EventLog, fence: Fence) -> None:
        self._engine, self._root, self._attempt, self._events = engine, root, attempt, events
        self._config, self._fence = engine.config.checkpoint, fence
        self._rank, self._group = dist.get_rank(), engine.control_group
        self._saver = shards.Saver(engine)
        self._pending: _Pending | None = None
        self._stall_seconds = 0.0
        self.longest_seconds = 0.0
        """From the beginning of a save to its commit, the longest so far; on every rank."""

    def save(self, state: TrainerState, validation_loss: float | None = None) -> None:
        """Begin to save; an earlier checkpoint that is still in the making is completed first.

        Args:
            state: where the run stands, equal on all ranks.
            validation_loss: of an evaluation at this step; None where there was none.

        Raises:
            TrainingFault: the folder cannot be made, or an earlier checkpoint could not be written; on all ranks.

        Collective: every rank calls it. Without `async_save` it returns when the checkpoint is committed and durable.
        """
        self.finish()
        began = time.monotonic()

        def begin() -> Path:
            self._fence.check(now=True)
            return checkpoint_store.begin(self._root, state.step)

        folder = self._on_rank_0(begin, state.step)
        writers = self._saver.begin(folder)
        seconds = time.monotonic() - began
        self._stall_seconds += seconds
        self._pending = _Pending(state, validation_loss, folder, writers, began, seconds, seconds)
        if not self._config.async_save:
            self.finish()

    def standing(self) -> int:
        """How this rank stands: `IDLE` also where its own files are written. No communication."""
        if self._pending is None:
            return IDLE
        done = self._pending.writers.done()
        if self._pending.writers.failure() is not None:
            return FAILED
        return IDLE if done else WRITING

    def settle(self, worst: int) -> None:
        """Commit what all ranks have written.

        Args:
            worst: the largest `standing()` of all ranks.

        Raises:
            TrainingFault: a rank could not write its files, or rank 0 could not commit them; on all ranks.

        Collective: every rank calls it with the same number.
        """
        if self._pending is not None and worst != WRITING:
            began, pending, self._pending = time.monotonic(), self._pending, None
            self._raise_failures(pending)
            self._commit(pending, began)
            self._stall_seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait for what is in the making and commit it. Collective: every rank calls it."""
        if self._pending is not None:
            began = time.monotonic()
            self._pending.writers.wait()
            waited = time.monotonic() - began
            self._pending.stall_seconds += waited
            self._stall_seconds += waited
            self.settle(IDLE)

    def take_stall_seconds(self) -> float:
        """How long training has waited for checkpoints since the last call."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def _raise_failures(self, pending: _Pending) -> None:
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, pending.writers.failure(), group=self._group)
        named = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
        if named:
            self._fail(pending.state.step, "; ".join(named))

    def _commit(self, pending: _Pending, began: float) -> None:
        step = pending.state.step
        written = self._completed(pending)
        seconds: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
        dist.all_gather_object(seconds, pending.writers.seconds, group=self._group)

        def commit() -> None:
            self._fence.check(now=True)
            content = pending.state.to_json(self._engine.layout, self._attempt.number) | {
                "validation_loss": pending.validation_loss,
                "time": now(),
                "precision": plan.precision_name(self._engine.config),
                "versions": provenance.versions(),
            }
            config = self._attempt.config.read_text()
            done = checkpoint_store.commit(pending.folder, content, written, config=config)
            ended = time.monotonic()
            self._events.write(
                "checkpoint",
                step,
                path=str(done.path),
                bytes=done.num_bytes,
                seconds=round(ended - pending.began, 3),
                stall_seconds=round(pending.stall_seconds + ended - began, 3),
                gather_seconds=round(pending.gather_seconds, 3),
                write_seconds=round(max(write for write, _ in seconds), 3),
                hash_seconds=round(max(digest for _, digest in seconds), 3),
                commit_seconds=round(ended - began, 3),
                files=len(written),
                asynchronous=self._config.async_save,
            )
            keep = self._config
            for path in checkpoint_store.retain(
                self._root,
                keep.keep_last,
                keep_every=keep.keep_every,
                keep_best=keep.keep_best,
                keep_hours=keep.keep_hours,
            ):
                self._events.write("checkpoint_removed", step, path=str(path))

        self._on_rank_0(commit, step)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - pending.began)

    def _completed(self, pending: _Pending) -> dict[str, tuple[int, str]]:
        """Bytes and digests of the files of all ranks, once megatron-core has completed the folder."""
        gathered: list[dict[str, tuple[int, str]]] = [{} for _ in range(dist.get_world_size())]
        try:
            own = pending.writers.finish()
        except OSError as error:
            self._fail(pending.state.step, f"rank {self._rank}: {error}")
        dist.all_gather_object(gathered, own, group=self._group)
        return {name: told for part in gathered for name, told in part.items()}

    def _on_rank_0[T](self, work: Callable[[], T], step: int) -> T:
        """Let rank 0 do something on disk; its result, or its failure, on all ranks. Collective: broadcast."""
        told: list[Any] = [None, None]
        if self._rank == 0:
            try:
                told[0] = work()
            except OSError as error:
                told[1] = f"rank 0: {error}"
        dist.broadcast_object_list(told, src=0, group=self._group)
        if told[1] is not None:
            self._fail(step, told[1])
        result: T = told[0]
        return result

    def _fail(self, step: int, reason: str) -> None:
        whole = ", ".join(str(checkpoint.step) for checkpoint in checkpoint_store.committed(self._root)) or "none"
        text = f"the checkpoint of step {step} could not be written: {reason}; whole ones in {self._root}: {whole}"
        with contextlib.suppress(OSError):
            text += f"; {summary.size(shutil.disk_usage(self._root).free)} are free there"
        raise TrainingFault(text)
