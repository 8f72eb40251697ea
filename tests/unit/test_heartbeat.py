"""What a rank's guardian sees of it, and how long it may be silent."""

import math
from dataclasses import replace

import pytest

from shardwright.conf.compose import compose
from shardwright.pretrain import heartbeat
from shardwright.pretrain.heartbeat import Heartbeat
from shardwright.pretrain.stragglers import slow

RESILIENCE = compose([]).resilience


def test_a_beat_is_read_as_it_was_written_in_a_forked_process_too() -> None:
    heart = Heartbeat()
    assert heart.read()[0] == 0
    heart.begin(heartbeat.limits(RESILIENCE), rank=3, host="n1")
    heart.beat("update", 7)
    heart.beat("agreement with the other ranks")
    assert heart.read()[:3] == (3, "agreement with the other ranks", 7)
    assert heart.told() == {"rank": 3, "host": "n1"}


def test_the_first_step_of_an_attempt_has_its_own_limit() -> None:
    heart = Heartbeat()
    heart.begin(heartbeat.limits(replace(RESILIENCE, data_timeout_seconds=9, first_step_timeout_seconds=1801)))
    limits = []
    for step in (40, 41):
        heart.beat("update", step)
        limits.append(heart.read()[3])
    assert limits == [1801, RESILIENCE.step_timeout_seconds]


def test_while_ranks_start_a_phase_may_take_as_long_as_those_before_it() -> None:
    limits = heartbeat.limits(RESILIENCE)
    assert limits["importing megatron-core"] == RESILIENCE.start_timeout_seconds
    assert limits["connecting ranks"] == limits["first step"] == RESILIENCE.data_timeout_seconds


def test_a_limit_of_0_is_none() -> None:
    limits = heartbeat.limits(replace(RESILIENCE, step_timeout_seconds=0))
    assert limits["update"] == math.inf and limits["saving"] == RESILIENCE.save_timeout_seconds


def test_collectives_wait_longer_than_any_phase_unless_the_user_says_otherwise() -> None:
    chosen = heartbeat.collective_timeout_seconds(RESILIENCE)
    assert chosen > max(limit for limit in heartbeat.limits(RESILIENCE).values() if limit < math.inf)
    assert heartbeat.collective_timeout_seconds(replace(RESILIENCE, distributed_timeout_seconds=20)) == 20


@pytest.mark.parametrize(("own", "ranks"), [([0.1, 0.1, 0.5], [2]), ([0.9, 0.1, 0.1, 0.6], [0, 3]), ([0.2] * 4, [])])
def test_slow_is_who_the_others_wait_for_most(own: list[float], ranks: list[int]) -> None:
    told = slow(own, 2.0, [f"n{rank}" for rank in range(len(own))], 0.1)
    assert (told["ranks"] if told else []) == ranks
    assert told is None or told["hosts"] == [f"n{rank}" for rank in ranks]


def test_a_rank_is_not_slow_for_what_is_little_of_a_step() -> None:
    assert slow([0.001, 0.05], 2.0, ["n1", "n2"], 0.1) is None
