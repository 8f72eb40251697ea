"""Tests of several ranks: one process imports torch and megatron once and forks the ranks of every test.

The device is chosen when this file is read, which is before any test module of the folder can import megatron-core:
these tests run on the CPU over gloo, also on a machine with GPUs.
"""

import importlib
from pathlib import Path

import pytest

from shardwright.parallel.mcore.environment import prepare

from . import commands
from .harness import RunRanks, run_ranks

prepare("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that `-m "not distributed"` leaves them out."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.distributed)


@pytest.fixture(scope="session", name="run_ranks")
def run_ranks_with_megatron_imported() -> RunRanks:
    """`harness.run_ranks`, in a process that has imported what every rank needs: a fork then costs under a second."""
    importlib.import_module("megatron.core")
    return run_ranks


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that makes all runs of a session share one tokenised corpus: it is built once, in ten seconds."""
    return f"data.cache_dir={tmp_path_factory.mktemp('data_cache')}"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    """A run of 12 steps over two tensor-parallel ranks, without dropout, saved at 6 and 12. Tests change copies."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    ended = commands.train(run_dir, *commands.FINISHED_RUN, cache, "schedule.train_iters=12")
    assert ended.code == 0, ended.out
    return run_dir
