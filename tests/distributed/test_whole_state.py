"""What a run saves again and again: saves that reuse the first one's plan, and the optimizer's gathered state."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.mcore import model, optimizers, shards, whole_state

from . import engines
from .harness import RunRanks

BUCKET_ELEMENTS = 5000
"""So small that the tiny model has many buckets, and that most of them end in padding."""


def save_with(saver: shards.Saver, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    writers = saver.begin(folder)
    writers.wait()
    dist.barrier()
    writers.finish()


def save_four_times(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> dict[str, list[str]]:
    """With a step before each; which tensors of some saves differ from those of the last state by a plan of its own."""
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    saver = shards.Saver(engine)
    for number in range(4):
        engines.train(engine, 1, first_seed=number)
        save_with(saver, folder / f"reused_{number}")
    engines.save(engine, folder / "anew")
    engines.train(engine, 1)
    shards.load(engine, folder / "reused_3", with_rng=True)
    engines.save(engine, folder / "loaded")
    expected = engines.full_tensors(folder / "anew")
    differ = {}
    for name in ("reused_2", "reused_3", "loaded"):
        found = engines.full_tensors(folder / name)
        assert found.keys() == expected.keys()
        differ[name] = [key for key in expected if not torch.equal(found[key], expected[key])]
    return differ


@pytest.mark.parametrize("overrides", [["parallel.tp=2"], []], ids=["tp2", "dp2"])
def test_a_save_that_reuses_the_plan_holds_what_one_that_plans_holds(
    run_ranks: RunRanks, tmp_path: Path, overrides: list[str]
) -> None:
    for differ in run_ranks(save_four_times, 2, overrides, tmp_path):
        assert differ["reused_3"] == differ["loaded"] == []
        assert len(differ["reused_2"]) > 20, "a step earlier all was otherwise"


def is_restored(rank: int, world: int, store: str, folder: Path, mended: bool) -> tuple[bool, bool]:
    """Whether there is padding behind a bucket that is not the last, and whether a load brings back what was saved."""
    if not mended:
        whole_state.install = lambda: None
    module: Any = model
    wrapped = module.DistributedDataParallel

    def with_small_buckets(*, ddp_config: Any, **rest: Any) -> Any:
        ddp_config.bucket_size = BUCKET_ELEMENTS
        return wrapped(ddp_config=ddp_config, **rest)

    module.DistributedDataParallel = with_small_buckets
    config = engines.config_of(["parallel.overlap_grad_reduce=true"], world)
    engine = engines.engine_of(config, rank, store)
    engines.train(engine, 1)
    (part,) = optimizers.parts(engine.optimizer)
    state = [value for each in part.optimizer.state.values() for value in each.values()]
    before = [value.clone() for value in state]
    engines.save(engine, folder)
    for value in state:
        value.zero_()
    shards.load(engine, folder, with_rng=True)
    after = [value for each in part.optimizer.state.values() for value in each.values()]
    buckets = part.buffers[0].buckets
    padded = any(bucket.numel_unpadded < bucket.grad_data.numel() for bucket in buckets[:-1])
    return padded, all(map(torch.equal, before, after))


@pytest.mark.parametrize("world", [1, 2])
def test_state_of_buckets_that_end_in_padding_comes_back_as_it_was(
    run_ranks: RunRanks, tmp_path: Path, world: int
) -> None:
    found = run_ranks(partial(is_restored, mended=True), world, tmp_path / "saved")
    assert found == [(True, True)] * world


def test_megatron_core_still_shifts_state_of_buckets_that_end_in_padding(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(partial(is_restored, mended=False), 2, tmp_path / "saved")
    assert found == [(True, False)] * 2, "megatron-core mended its gather: look whether whole_state is still worth it"
