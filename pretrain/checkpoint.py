"""Saving a run: shards by all ranks, policy by rank 0."""

import time
from pathlib import Path

import torch.distributed as dist

from shardwright.data.cache import flush
from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine
from shardwright.pretrain import checkpoint_store
from shardwright.pretrain.events import EventLog
from shardwright.pretrain.trainer_state import TrainerState


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
    for name in mine:
        flush(temporary / name)
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
