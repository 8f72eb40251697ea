"""Saving a run: shards by all ranks, policy by rank 0.

What a checkpoint holds besides shards is `TrainerState`, plain JSON: where the run stands and in which layout it stood.
"""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.data.sampler import DataPosition
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine
from shardwright.pretrain import checkpoint_store
from shardwright.pretrain.events import EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where a run stands after `step` optimizer steps; equal on all ranks."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    trained_tokens: int = 0
    """Unmasked tokens that updates were computed from."""

    def after_step(self, num_samples: int, num_tokens: int) -> "TrainerState":
        """The state after one more step."""
        return replace(
            self,
            step=self.step + 1,
            position=self.position.consume(num_samples),
            trained_tokens=self.trained_tokens + num_tokens,
        )

    def to_json(self, layout: Layout, attempt: int) -> dict[str, Any]:
        """As written into the checkpoint."""
        return {
            "format_version": 1,
            "step": self.step,
            "consumed_samples": self.position.consumed_samples,
            "skipped_samples": [list(skipped) for skipped in self.position.skipped],
            "trained_tokens": self.trained_tokens,
            "layout": asdict(layout),
            "attempt": attempt,
        }

    @classmethod
    def read(cls, checkpoint: Path) -> "TrainerState":
        """From the folder of a committed checkpoint."""
        saved = _trainer_json(checkpoint)
        skipped = tuple((first, end) for first, end in saved["skipped_samples"])
        return cls(
            step=saved["step"],
            position=DataPosition(saved["consumed_samples"], skipped),
            trained_tokens=saved["trained_tokens"],
        )

    @staticmethod
    def read_layout(checkpoint: Path) -> Layout:
        """The layout that wrote a committed checkpoint."""
        return Layout(**_trainer_json(checkpoint)["layout"])


def _trainer_json(checkpoint: Path) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads((checkpoint / checkpoint_store.TRAINER).read_text())
    return saved


def save(engine: Engine, state: TrainerState, root: Path, *, keep_last: int, attempt: int, events: EventLog) -> None:
    """Write, commit and announce a checkpoint, then remove what is older than the last `keep_last`.

    Collective: every rank calls it; returns when the checkpoint is committed and durable.
    """
    started, rank, world = time.monotonic(), dist.get_rank(), dist.get_world_size()
    folder = [checkpoint_store.begin(root, state.step) if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    temporary = folder[0]
    assert temporary is not None
    shards.save(engine, temporary)
    mine = checkpoint_store.files(temporary)[rank::world]
    checkpoint_store.sync(temporary / name for name in mine)
    gathered: list[dict[str, str]] = [{} for _ in range(world)]
    dist.all_gather_object(gathered, {name: checkpoint_store.sha256(temporary / name) for name in mine})
    if rank == 0:
        digests = {name: digest for part in gathered for name, digest in part.items()}
        done = checkpoint_store.commit(temporary, state.to_json(engine.layout, attempt), digests)
        seconds = time.monotonic() - started
        events.write("checkpoint", state.step, path=str(done.path), seconds=round(seconds, 3), bytes=done.num_bytes)
        for path in checkpoint_store.retain(root, keep_last):
            events.write("checkpoint_removed", state.step, path=str(path))
    dist.barrier()
