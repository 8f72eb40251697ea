"""The table of optimizers, number formats, recomputation and layouts on GPUs: what the rules let through trains."""

import math
import multiprocessing
from pathlib import Path

import pytest

from shardwright.pretrain.machine import detect
from shardwright.tests import combinations
from shardwright.tests.combinations import FACTORS, Case

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SECONDS = 900
"""Compiling and loading kernels for some forty models; a hanging rank is ended then."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return combinations.cases("cuda", detect())


@pytest.mark.parametrize("layout", FACTORS["layout"])
def test_what_is_not_refused_trains(cases: list[Case], layout: str, tmp_path: Path) -> None:
    num_ranks, present = 1 if layout == "one rank" else 2, len(detect().gpus)
    if present < num_ranks:
        pytest.skip(f"{num_ranks} GPUs are needed, and {present} are there")
    running = [case for case in cases if layout in case.row and not case.problems]
    assert running
    spawned = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with spawned.Pool(num_ranks) as pool:
        arguments = [(rank, num_ranks, str(tmp_path / "store"), running, "cuda") for rank in range(num_ranks)]
        for losses in pool.starmap_async(combinations.train, arguments, chunksize=1).get(SECONDS):
            assert losses.keys() == {case.name for case in running}
            for name, curve in losses.items():
                assert all(map(math.isfinite, curve)), name
                assert curve[-1] < curve[0], name
