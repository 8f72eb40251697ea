"""What `plan` expects of failures: the formula against runs that are played through, and its best save interval."""

import random
from dataclasses import replace

import pytest

from shardwright.conf import compose
from shardwright.pretrain import plan
from shardwright.pretrain.reliability import SECONDS_PER_DAY, Reliability

LLAMA_405B = Reliability(
    gpus=16384,
    failures_per_gpu_day=466 / 54 / 16384,
    restart_seconds=300,
    save_stall_seconds=20,
    step_seconds=5,
    save_interval=200,
)
SIMULATION_TOLERANCE = 0.01
"""Of 4,000 failures the mean differs from its expectation by 1 / sqrt(4000) of the part that is lost."""


def played(expected: Reliability, failures: int) -> float:
    """Seconds that train over all seconds, of a run that is played through until so many failures have come."""
    numbers, mean = random.Random(1), expected.seconds_between_failures
    interval = expected.save_interval * expected.step_seconds
    trained = now = 0.0
    fails = numbers.expovariate(1 / mean)
    work = interval + expected.save_stall_seconds
    while failures:
        if now + work <= fails:
            now += work
            trained += interval
            work = interval + expected.save_stall_seconds
        else:
            now, failures = fails, failures - 1
            fails = now + numbers.expovariate(1 / mean)
            work = expected.restart_seconds + interval + expected.save_stall_seconds
    return trained / now


@pytest.mark.parametrize("interval", [40, 200, 2000])
@pytest.mark.parametrize("restart_seconds", [0.0, 300.0, 7200.0])
def test_the_formula_is_what_a_run_that_is_played_through_shows(interval: int, restart_seconds: float) -> None:
    expected = replace(LLAMA_405B, save_interval=interval, restart_seconds=restart_seconds)
    assert expected.ettr == pytest.approx(played(expected, 4000), abs=SIMULATION_TOLERANCE)


@pytest.mark.parametrize("gpus", [8, 512, 16384, 1_000_000])
def test_no_other_interval_trains_more_than_the_best_one(gpus: int) -> None:
    best = replace(LLAMA_405B, gpus=gpus).best()
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert best.varied(interval=factor).ettr <= best.ettr * (1 + 1e-4)


def test_llama_3_405b_was_interrupted_every_three_hours() -> None:
    assert LLAMA_405B.seconds_between_failures / 3600 == pytest.approx(2.78, abs=0.01)


def test_a_run_that_never_completes_an_interval_trains_nothing() -> None:
    assert replace(LLAMA_405B, save_interval=10**9).ettr == 0.0


def test_plan_says_it_where_the_gpu_is_known() -> None:
    words = ["model=llama3_8b", "precision=bf16", "data.global_batch_size=512", "data.micro_batch_size=1"]
    planned = plan.make_plan(compose.compose([*words, "cluster=dgx_h100", "cluster.nodes=8"]))
    told = plan.as_json(planned)["reliability"]
    seconds = planned.flops_per_token * planned.batch.tokens_per_step / (64 * 989e12 * 0.4)
    assert told["step_seconds"] == pytest.approx(seconds)
    assert told["seconds_between_failures"] == pytest.approx(SECONDS_PER_DAY / (64 * 0.000527))
    assert 0 < told["ettr"] < told["best_ettr"] < 1
    assert plan.make_plan(compose.compose([*words, "cluster.ranks=8"])).reliability is None
