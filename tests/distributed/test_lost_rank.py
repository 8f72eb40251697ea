"""A rank that goes wrong ends the run at once: it is named, its victims are not, and no process is left.

Two data-parallel ranks; rank 1 goes wrong at its third step, rank 0 then waits for it inside of a collective.
"""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from . import commands

LIMIT_SECONDS = 60.0
"""Within this time after its last good step a run has ended whose rank went wrong."""

AT_ONCE = "checkpoint.async_save=false"
"""A rank that is lost takes along what it was still writing; what all ranks stop for together does not."""


class FaultyRun:
    """A run with a planted fault, and all that can be known of it afterwards."""

    def __init__(self, run_dir: Path, kind: str, *overrides: str) -> None:
        command = commands.start(
            run_dir,
            *commands.SMALL,
            "cluster.ranks=2",
            "data=mock",
            "checkpoint.save_interval=2",
            "schedule.eval_interval=0",
            *overrides,
            fault=f"1:3:{kind}",
        )
        command.wait_for(lambda: 2 in commands.steps(run_dir))
        ended = command.wait(LIMIT_SECONDS)
        self.code, self.out = ended.code, ended.out
        self.left = command.left()
        self.status: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
        self.steps, self.checkpoints = commands.steps(run_dir), commands.checkpoints(run_dir)
        self.faults = [(row["data"]["rank"], row["data"]["error"]) for row in commands.events(run_dir, "fault")]

    def ended_by_rank_1(self, code: int, error: str) -> None:
        """Everything says the same: this code, rank 1, its error; two steps were done and saved; nothing is left."""
        assert (self.code, self.left) == (code, []), self.out
        assert (self.status["state"], self.status["exit_code"]) == ("failed", code)
        assert self.status["error"]["rank"] == 1
        assert self.status["error"]["host"] == socket.gethostname()
        assert error in self.status["error"]["error"]
        [(rank, said)] = self.faults
        assert rank == 1 and error in said
        assert f"rank 1 on {socket.gethostname()}" in self.out and error in self.out
        assert "rank 0 on" not in self.out
        assert self.steps == [1, 2]
        assert self.checkpoints == ["latest", "step_00000002"]


@pytest.mark.slow
def test_a_rank_that_exits_ends_the_run_with_3(tmp_path: Path) -> None:
    FaultyRun(tmp_path / "run", "exits", AT_ONCE).ended_by_rank_1(3, "exit code 7")


def test_a_rank_that_is_killed_ends_the_run_with_3(tmp_path: Path) -> None:
    FaultyRun(tmp_path / "run", "is_killed", AT_ONCE).ended_by_rank_1(3, "killed by SIGKILL")


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_run_with_1_in_its_own_words(tmp_path: Path) -> None:
    FaultyRun(tmp_path / "run", "raises", AT_ONCE).ended_by_rank_1(1, "ValueError: the planted error")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_anything_is_saved(tmp_path: Path) -> None:
    run = FaultyRun(tmp_path / "run", "has_nan")
    assert (run.code, run.left) == (3, []), run.out
    assert (run.status["state"], run.status["exit_code"]) == ("failed", 3)
    assert "update 3: the loss is nan" in run.out
    assert run.steps == [1, 2]
    assert run.checkpoints == ["latest", "step_00000002"]


def test_one_lost_loss_stops_all_and_names_its_rank(tmp_path: Path) -> None:
    run = FaultyRun(tmp_path / "run", "loses_a_loss")
    assert (run.code, run.left) == (3, []), run.out
    assert "update 3: the loss is nan on rank 1" in run.out
    assert run.steps == [1, 2]
    assert run.checkpoints == ["latest", "step_00000002"]


def test_one_lost_loss_is_skipped_and_counted_where_that_is_the_policy(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = FaultyRun(folder, "loses_a_loss", "resilience.on_non_finite=skip", "schedule.train_iters=5")
    assert (run.code, run.left) == (0, []), run.out
    assert run.steps == [1, 2, 3, 4, 5]
    counted = [(row["skipped_updates"], row["non_finite_updates"]) for row in commands.rows(folder)]
    assert counted == [(0, 0), (0, 0), (1, 1), (1, 1), (1, 1)]
    [skipped] = commands.events(folder, "update_skipped")
    assert (skipped["step"], skipped["data"]["reason"]) == (3, "update 3: the loss is nan on rank 1")
    assert all(row["loss"] == row["loss"] for row in commands.rows(folder) if row["step"] != 3), "weights are whole"
