"""Every optimizer with every number format, recomputation and layout, by pairs: it trains, or a rule says why not."""

import itertools
import math

import pytest

from shardwright.pretrain.machine import detect

from .. import combinations
from ..combinations import FACTORS, Case, pairs_of
from .harness import RunRanks
from .tail import long_tail


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return combinations.cases("cpu", detect())


@pytest.mark.parametrize("layout", long_tail(FACTORS["layout"], quick=["one rank", "TP2 with SP"]))
def test_what_is_not_refused_trains(run_ranks: RunRanks, cases: list[Case], layout: str) -> None:
    running = [case for case in cases if layout in case.row and not case.problems]
    num_ranks = 1 if layout == "one rank" else 2
    assert running
    for losses in run_ranks(combinations.train, num_ranks, running, "cpu", timeout_seconds=180):
        assert losses.keys() == {case.name for case in running}
        for name, curve in losses.items():
            assert all(map(math.isfinite, curve)), name
            assert curve[-1] < curve[0], name


def test_what_is_refused_has_a_reason_and_a_remedy(cases: list[Case]) -> None:
    refused = [case for case in cases if case.problems]
    assert refused
    for case in refused:
        assert all(problem.rule and problem.remedy for problem in case.problems), case.name


def test_every_pair_of_choices_is_met(cases: list[Case]) -> None:
    every = {pair for row in itertools.product(*FACTORS.values()) for pair in pairs_of(row)}
    assert {pair for case in cases for pair in pairs_of(case.row)} == every
    assert len(cases) < math.prod(map(len, FACTORS.values())) / 10
