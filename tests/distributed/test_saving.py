"""Saving beside training: what is there at every moment, what a write that fails leads to, and what stays on disk."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.pretrain import checkpoint_store

from . import commands

OVERRIDES = (
    *commands.SMALL,
    *commands.TWO_TENSOR_PARALLEL,
    "schedule.eval_interval=0",
    "checkpoint.save_interval=3",
    "schedule.lr_decay_iters=20",
)


def whole_steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoint_store.committed(run_dir / "checkpoints")]


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written_and_a_kill_then_costs_that_one_alone(
    tmp_path: Path, cache: str
) -> None:
    run_dir = tmp_path / "run"
    command = commands.start(
        run_dir, *OVERRIDES, cache, commands.ENDLESS, "checkpoint.keep_last=1", fault="1:4:writes_slowly"
    )
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        root = run_dir / "checkpoints"
        if (root / "latest").exists():
            named = root / (root / "latest").read_text().strip()
            seen.append(((named / checkpoint_store.MARKER).exists(), len(whole_steps(run_dir))))

    def trains_beside_the_save(step: int) -> Callable[[], bool]:
        def condition() -> bool:
            look()
            return step in commands.steps(run_dir)

        return condition

    command.wait_for(trains_beside_the_save(7))
    assert ".writing_step_00000006" in commands.checkpoints(run_dir), "step 7 was trained before step 6 was written"
    command.process.send_signal(signal.SIGKILL)
    command.wait()
    assert command.left() == []
    assert len(seen) > 3 and all(marked and count >= 1 for marked, count in seen)
    assert whole_steps(run_dir) == [3]
    ended = commands.train(run_dir, "schedule.train_iters=9")
    assert ended.code == 0, ended.out
    assert commands.events(run_dir, "resume")[0]["step"] == 3
    assert whole_steps(run_dir) == [9]


def test_a_write_that_fails_surfaces_at_the_next_step_on_all_ranks_and_earlier_checkpoints_stay(
    tmp_path: Path, cache: str
) -> None:
    run_dir = tmp_path / "run"
    ended = commands.train(run_dir, *OVERRIDES, cache, commands.ENDLESS, fault="1:4:has_no_room")
    assert ended.code == 3, ended.out
    words = ("the checkpoint of step 6 could not be written", "rank 1", "File too large", "checkpoints: 3")
    assert [word for word in words if word not in ended.out] == []
    assert "Traceback" not in ended.out
    for rank in (0, 1):
        failure = json.loads((run_dir / "attempts" / "001" / "errors" / f"rank_{rank:05d}.json").read_text())
        assert "could not be written: rank 1: __1_0.distcp" in failure["error"]
    assert whole_steps(run_dir) == [3]
    assert commands.steps(run_dir)[-1] < 9, "it ended before the next save"


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_last_checkpoint_is_durable_before_exit_0_and_the_seconds_are_told(
    tmp_path: Path, cache: str, asynchronous: str
) -> None:
    run_dir = tmp_path / "run"
    began = time.monotonic()
    many = ("checkpoint.keep_last=1", "checkpoint.keep_every=4", "checkpoint.save_interval=2")
    ended = commands.train(
        run_dir, *OVERRIDES, cache, "schedule.train_iters=9", *many, f"checkpoint.async_save={asynchronous}"
    )
    seconds = time.monotonic() - began
    assert ended.code == 0, ended.out
    assert whole_steps(run_dir) == [4, 8, 9]
    assert [name for name in commands.checkpoints(run_dir) if name.startswith(".")] == []
    events = commands.events(run_dir, "checkpoint")
    assert [event["step"] for event in events] == [2, 4, 6, 8, 9]
    for event in events:
        told = event["data"]
        assert told["asynchronous"] is (asynchronous == "true")
        assert 0 < told["write_seconds"] <= told["seconds"] < seconds
        assert 0 < told["gather_seconds"] <= told["stall_seconds"] <= told["seconds"] + 0.01
    stalls = [row["checkpoint_stall_seconds"] for row in commands.rows(run_dir)]
    assert stalls[:2] == [0.0, 0.0] and stalls[2] > 0
