"""Schedules against megatron-core's own, and a run whose batch size grows while it is stopped and continued."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from shardwright.conf.compose import compose
from shardwright.conf.schema import Config
from shardwright.data.batch_size import BatchSizes
from shardwright.pretrain.schedule import decay_updates, next_update, warmup_updates

from . import commands

CURVES = ("schedule.train_iters=60", "schedule.lr_warmup_iters=7", "schedule.lr_decay_iters=50")
SAME_FORMULA = 1e-12
"""Relative: the same sums and products, written in another order."""
RAMPED = (
    *commands.SMALL,
    "data=mock",
    "parallel.pp=2",
    "cluster.ranks=2",
    "data.rampup_batch_size=[1,1,9]",
    "schedule.train_iters=9",
    "schedule.lr_warmup_iters=null",
    "schedule.lr_warmup_samples=12",
    "schedule.end_weight_decay=0.2",
    "schedule.weight_decay_incr_style=linear",
    "schedule.eval_interval=0",
)


def megatron_core_scheduler(config: Config) -> tuple[OptimizerParamScheduler, dict]:
    group: dict = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=warmup_updates(config),
        lr_decay_steps=decay_updates(config),
        lr_decay_style=config.schedule.lr_decay_style.value.replace("_", "-"),
        start_wd=config.optimizer.weight_decay,
        end_wd=config.schedule.end_weight_decay or config.optimizer.weight_decay,
        wd_incr_steps=config.schedule.train_iters,
        wd_incr_style=config.schedule.weight_decay_incr_style.value,
        wsd_decay_steps=config.schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.schedule.lr_wsd_decay_style.value,
    )
    return scheduler, group


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"schedule={style}"] for style in ("constant", "cosine", "linear", "inverse_square_root")),
        *(
            ["schedule=wsd", f"schedule.lr_wsd_decay_style={style}"]
            for style in ("linear", "cosine", "exponential", "minus_sqrt")
        ),
        *(
            [f"schedule.weight_decay_incr_style={style}", "schedule.end_weight_decay=0.3"]
            for style in ("linear", "cosine")
        ),
        ["schedule=inverse_square_root", "schedule.lr_warmup_iters=0", "optimizer.min_lr=0"],
        ["schedule=linear", "schedule.lr_warmup_iters=null", "schedule.lr_warmup_fraction=0.2"],
    ],
    ids=" ".join,
)
def test_update_k_uses_what_megatron_core_would_use_one_update_later(overrides: list[str]) -> None:
    config = compose([*CURVES, *overrides])
    scheduler, group = megatron_core_scheduler(config)
    assert group["lr"] in (0.0, config.optimizer.lr), "megatron-core's first update, without ours"
    for step in range(config.schedule.train_iters):
        scheduler.step(1)
        update = next_update(step, step * config.data.global_batch_size, config)
        assert update.learning_rate == pytest.approx(group["lr"], rel=SAME_FORMULA)
        assert update.weight_decay == pytest.approx(group["weight_decay"], rel=SAME_FORMULA)


def test_a_ramp_is_a_schedule_of_megatron_cores_stages() -> None:
    data = compose(["data.global_batch_size=64", "data.rampup_batch_size=[16,8,1000]", "data.micro_batch_size=4"]).data
    sizes = BatchSizes.of(data)
    stages = " ".join(f"{samples}:{size}" for samples, size in sizes.stages)
    theirs = StepBatchsizeNumMicroBatchesCalculator(4, 1, False, 1, stages)
    for consumed in range(1200):
        theirs.update(consumed, consistency_check=True)
        assert sizes.at(consumed) == theirs.get_current_global_batch_size()


@pytest.mark.slow
def test_a_run_that_stops_in_the_ramp_goes_on_as_if_it_never_stopped(tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    ended = commands.train(whole, *RAMPED, "checkpoint.save_interval=5", "checkpoint.keep_last=9")
    assert ended.code == 0, ended.out
    rows = commands.rows(whole)
    assert [row["batch_size"] for row in rows] == [1, 1, 1, 2, 2, 3, 4, 4, 4]
    assert [row["consumed_samples"] for row in rows] == [1, 2, 3, 5, 7, 10, 14, 18, 22]
    assert [row["tokens"] for row in rows] == [64 * row["consumed_samples"] for row in rows]
    assert rows[0]["lr"] == pytest.approx(1e-3 / 12) and rows[0]["weight_decay"] == pytest.approx(0.1 + 0.1 / 9)
    assert commands.events(whole, "start")[0]["data"]["tokens_left"] == 64 * 22

    ended = commands.train(rest, *RAMPED, f"checkpoint.load={whole}", "checkpoint.load_step=5")
    assert ended.code == 0, ended.out
    assert commands.trajectory(rest) == commands.trajectory(whole)[5:]
    assert commands.events(rest, "start")[0]["data"]["tokens_left"] == 64 * (22 - 7)


@pytest.mark.slow
def test_a_schedule_that_changes_at_a_resume_counts_from_the_next_update_and_is_told(tmp_path: Path) -> None:
    constant = ("schedule=constant", "optimizer.lr=6e-4", "schedule.lr_warmup_iters=0", "schedule.eval_interval=0")
    ended = commands.train(tmp_path / "run", *commands.SMALL, "data=mock", *constant, "schedule.train_iters=10")
    assert ended.code == 0, ended.out
    cosine = ("schedule=cosine", "optimizer.lr=3e-5", "optimizer.min_lr=2e-5", "schedule.lr_warmup_iters=0")
    ended = commands.train(tmp_path / "run", *cosine, "schedule.train_iters=13", "data.global_batch_size=8")
    assert ended.code == 0, ended.out
    assert "0.0006 -> 3e-05 (results change)" in ended.out and "4 -> 8 (results change)" in ended.out
    rows = commands.rows(tmp_path / "run")
    assert {row["lr"] for row in rows[:10]} == {6e-4}
    assert all(2e-5 <= row["lr"] <= 3e-5 for row in rows[10:])
    assert [row["consumed_samples"] for row in rows[9:]] == [40, 48, 56, 64], "none twice, none left out"
