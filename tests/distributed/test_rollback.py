"""A loss that stays high sends the run back to its last good checkpoint and past the data it rose on."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.parallel.mcore import shards
from shardwright.pretrain import checkpoint_store
from shardwright.pretrain.events import read_rows

from . import commands, engines
from .harness import RunRanks


def goes_back(rank: int, world: int, store: str, folder: Path) -> Any:
    """Two steps, a checkpoint, one step; then two others, back into the same engine, and that step again."""
    overrides = ["parallel.tp=2", "parallel.sp=true", "precision=fp8_delayed", "precision.dtype=fp32"]
    config = engines.config_of([*overrides, "precision.backend=emulated", "model.hidden_dropout=0.1"], world)
    engine = engines.engine_of(config, rank, store)
    engines.train(engine, 2)
    engines.save(engine, folder)
    first = engines.train(engine, 1, first_seed=2)
    engines.train(engine, 2, first_seed=9)
    shards.load(engine, folder, with_rng=True)
    return first, engines.train(engine, 1, first_seed=2)


def test_an_engine_that_has_trained_on_takes_a_checkpoint_as_a_new_one_does(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    for first, again in run_ranks(goes_back, 2, tmp_path / "checkpoint"):
        assert first == again


@pytest.fixture(scope="module")
def went_back(tmp_path_factory: pytest.TempPathFactory, cache: str) -> tuple[Path, str]:
    """Thirty steps, saved every five; the loss of steps 23 and 24 is five times too large."""
    run_dir = tmp_path_factory.mktemp("rollback") / "run"
    rollback = ("resilience.rollback=1", "resilience.rollback_patience=2", "resilience.rollback_lr=0.5")
    overrides = (*commands.SMALL, *commands.TWO_TENSOR_PARALLEL, *rollback, cache)
    intervals = ("checkpoint.save_interval=5", "schedule.eval_interval=0", "schedule.train_iters=30")
    ended = commands.train(run_dir, *overrides, *intervals, "checkpoint.keep_last=9", fault="*:23:loses_its_way")
    assert ended.code == 0, ended.out
    return run_dir, ended.out


@pytest.mark.slow
def test_the_run_goes_back_to_the_checkpoint_before_the_rise_and_says_so(went_back: tuple[Path, str]) -> None:
    (event,) = commands.events(went_back[0], "rollback")
    assert event["step"] == 24 and event["data"]["to_step"] == 20
    assert event["data"]["loss"] > 2 * event["data"]["mean_loss"] and event["data"]["number"] == 1
    assert "back to step 20, past 16 samples (1 of at most 1 times)" in went_back[1]


@pytest.mark.slow
def test_every_step_counts_once_and_the_bad_ones_are_put_away(went_back: tuple[Path, str]) -> None:
    assert commands.steps(went_back[0]) == list(range(1, 31))
    removed = [row["step"] for row in read_rows(went_back[0] / "attempts/001/removed_metrics.jsonl")]
    assert removed == [21, 22, 23, 24]
    assert max(row["loss"] for row in commands.rows(went_back[0])) < 10


@pytest.mark.slow
def test_the_data_of_the_rise_are_passed_over_and_the_learning_rate_is_cut(went_back: tuple[Path, str]) -> None:
    saved = checkpoint_store.trainer(went_back[0] / "checkpoints" / "step_00000030")
    assert saved["skipped_samples"] == [[80, 96]] and saved["consumed_samples"] == 120
    assert saved["rollbacks"] == 1
    rates = {row["step"]: row["lr"] for row in commands.rows(went_back[0])}
    assert rates[21] < 0.6 * rates[20]
