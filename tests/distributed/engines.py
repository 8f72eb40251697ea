"""Engines for tests: built in a rank from config overrides, fed with given tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shardwright.conf.compose import compose
from shardwright.conf.schema import Config
from shardwright.data.loader import Batch
from shardwright.parallel.mcore import groups, shards
from shardwright.parallel.mcore.engine import Engine
from shardwright.pretrain import plan

SEQ_LENGTH, GLOBAL_BATCH = 64, 4
TINY = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.kv_channels=16",
    "model.vocab_size=500",
]
"""A model whose vocabulary is padded (to 512), with grouped queries and a tied embedding."""
BATCHES = [f"data.seq_length={SEQ_LENGTH}", f"data.global_batch_size={GLOBAL_BATCH}", "data.micro_batch_size=1"]


def config_of(overrides: list[str], world_size: int) -> Config:
    """The tiny run with `overrides`."""
    return family_config([*TINY, *overrides], world_size)


def family_config(overrides: list[str], world_size: int) -> Config:
    """A tiny sibling of a family (`model=tiny_...`) under the sequences and batches of these tests."""
    return compose([*BATCHES, f"cluster.ranks={world_size}", "cluster.gpu=none", *overrides])


def engine_of(config: Config, rank: int, store: str) -> Engine:
    """Start the process groups of a rank and build its engine."""
    layout = plan.layout(config)
    world = groups.start(layout, torch.device("cpu"), rank, 60, FileStore(store, layout.world_size))
    groups.seed_everything(config.run.seed, layout, rank)
    return Engine(config, layout, world, torch.device("cpu"), rank, plan.padded_vocab_size(config.model))


def engines_of(configs: list[Config], rank: int, store: str) -> Iterator[Engine]:
    """An engine for each configuration, in the process groups of the first, with the weights of a new process."""
    first = engine_of(configs[0], rank, store)
    yield first
    world = groups.Groups(first.groups, first.control_group)
    for config in configs[1:]:
        groups.seed_everything(config.run.seed, first.layout, rank)
        yield Engine(config, first.layout, world, first.device, rank, plan.padded_vocab_size(config.model))


def random_step(seed: int, vocab_size: int = 500, unmasked: list[int] | None = None) -> Batch:
    """One global batch of random tokens; sample i counts only its first `unmasked[i]` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (GLOBAL_BATCH, SEQ_LENGTH + 1), generator=generator)
    mask = torch.ones(GLOBAL_BATCH, SEQ_LENGTH)
    for sample, count in enumerate(unmasked or []):
        mask[sample, count:] = 0.0
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(SEQ_LENGTH).expand(GLOBAL_BATCH, -1).contiguous(),
    }


def share(engine: Engine, step: Batch) -> list[Batch]:
    """This rank's micro-batches of a global batch."""
    size, at = engine.config.data.micro_batch_size, engine.layout.coordinates(dist.get_rank())
    starts = range(at.dp * size, GLOBAL_BATCH, size * engine.layout.dp)
    return [{name: tensor[start : start + size] for name, tensor in step.items()} for start in starts]


def train(engine: Engine, num_steps: int, first_seed: int = 0) -> list[tuple[float, float | None]]:
    """Loss and gradient norm of some steps at a constant learning rate."""
    steps = (random_step(first_seed + number) for number in range(num_steps))
    results = [engine.train_step(share(engine, step), lr=1e-3, weight_decay=0.1) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]


def save(engine: Engine, folder: Path) -> None:
    """Write the shards into a new folder."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    shards.save(engine, folder)


def full_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: weights, and Adam's state as `optimizer.state.*`."""
    from megatron.core import dist_checkpointing

    loaded: dict[str, Any] = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
