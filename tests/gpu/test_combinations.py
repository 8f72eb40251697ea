"""The table of optimizers, number formats, recomputation and layouts on GPUs: what the rules let through trains.

The ranks are forked from a process that has not touched CUDA; each of them begins with it by itself.
"""

import math

import pytest

from shardwright.pretrain.machine import detect

from .. import combinations
from ..combinations import FACTORS, Case
from ..distributed.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SECONDS = 900
"""Importing, and loading kernels for some forty models; a rank that hangs is ended then."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return combinations.cases("cuda", detect())


@pytest.mark.parametrize("layout", FACTORS["layout"])
def test_what_is_not_refused_trains(cases: list[Case], layout: str) -> None:
    num_ranks, present = 1 if layout == "one rank" else 2, len(detect().gpus)
    if present < num_ranks:
        pytest.skip(f"{num_ranks} GPUs are needed, and {present} are there")
    running = [case for case in cases if layout in case.row and not case.problems]
    assert running
    for losses in run_ranks(combinations.train, num_ranks, running, "cuda", timeout_seconds=SECONDS):
        assert losses.keys() == {case.name for case in running}
        for name, curve in losses.items():
            assert all(map(math.isfinite, curve)), name
            assert curve[-1] < curve[0], name
