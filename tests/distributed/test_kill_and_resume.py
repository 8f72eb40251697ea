"""A run that is killed three times and stopped once ends as the run that never was: bit for bit, and nothing is left.

The interrupted run has dropout, sequence parallelism and loader processes (grandchildren of the launcher). What it is
compared with loads its data in the ranks, so that the two differ in the number of loader processes too.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwright.pretrain.events import read_rows

from . import commands

STEPS, SAVE_INTERVAL = 12, 3
OVERRIDES = (
    *commands.SMALL,
    *commands.TWO_TENSOR_PARALLEL,
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    f"schedule.lr_decay_iters={STEPS}",
    "schedule.eval_interval=6",
    f"checkpoint.save_interval={SAVE_INTERVAL}",
)
TO_THE_END = f"schedule.train_iters={STEPS}"
NUM_PROCESSES = 1 + 2 * (1 + 1 + 2)
"""The launcher; of each rank itself, its guardian and two loaders. Torch writes checkpoints in further processes."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """One attempt that did not come to its end."""

    code: int
    step: int
    """The last step in metrics.jsonl."""
    processes: int
    """How many there were just before."""
    checkpoints: list[str]
    """What it left in the checkpoints folder."""
    state: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run with a history."""

    path: Path
    kills: list[Interruption]
    stop: Interruption
    last: commands.Ended


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended = commands.train(run_dir, *OVERRIDES, cache, TO_THE_END)
    assert ended.code == 0, ended.out
    return run_dir


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Interrupted:
    """Killed before the first checkpoint, while one is being written, and after one; then stopped; then left alone."""
    run_dir = tmp_path_factory.mktemp("interrupted") / "run"

    def has_step(step: int) -> Callable[[], bool]:
        return lambda: step in commands.steps(run_dir)

    def has_checkpoint(step: int) -> Callable[[], bool]:
        return lambda: has_step(step + 1)() and f"step_{step:08d}" in commands.checkpoints(run_dir)

    def writes_a_checkpoint() -> bool:
        return f".writing_step_{2 * SAVE_INTERVAL:08d}" in commands.checkpoints(run_dir)

    first, again = (*OVERRIDES, cache, commands.ENDLESS, "data.num_workers=2"), ()
    kills = [
        interrupt(run_dir, overrides, condition, signal.SIGKILL)
        for overrides, condition in ((first, has_step(2)), (again, writes_a_checkpoint), (again, has_checkpoint(6)))
    ]
    stop = interrupt(run_dir, again, has_step(7), signal.SIGTERM)
    return Interrupted(run_dir, kills, stop, commands.train(run_dir, TO_THE_END))


def interrupt(
    run_dir: Path, overrides: tuple[str, ...], condition: Callable[[], bool], signum: signal.Signals
) -> Interruption:
    """Start an attempt and send its launcher a signal as soon as `condition` holds; no process may be left of it."""
    number = len(list((run_dir / "attempts").glob("*"))) + 1
    command = commands.start(run_dir, *overrides)
    command.wait_for(lambda: condition() and commands.rows(run_dir)[-1]["attempt"] == number)
    processes = len(command.processes())
    command.process.send_signal(signum)
    code, left = command.wait().code, command.left()
    assert left == [], f"{commands.GONE_SECONDS:g} s after {signum.name} these processes were left: {left}"
    return Interruption(
        code=code,
        processes=processes,
        step=commands.steps(run_dir)[-1],
        checkpoints=commands.checkpoints(run_dir),
        state=json.loads((run_dir / "status.json").read_text())["state"],
    )


def test_a_run_killed_three_times_and_stopped_once_equals_the_one_never_interrupted_bit_for_bit(
    uninterrupted: Path, interrupted: Interrupted
) -> None:
    assert interrupted.last.code == 0, interrupted.last.out
    assert commands.trajectory(interrupted.path) == commands.trajectory(uninterrupted)
    losses = [event["data"]["loss"] for event in commands.events(uninterrupted, "eval")]
    assert [event["data"]["loss"] for event in commands.events(interrupted.path, "eval")][-2:] == losses


def test_dropout_is_on_in_these_runs(uninterrupted: Path, finished_run: Path) -> None:
    assert commands.rows(uninterrupted)[0]["loss"] != commands.rows(finished_run)[0]["loss"]


def _newest(kill: Interruption) -> int:
    return max(int(name.removeprefix("step_")) for name in kill.checkpoints if name.startswith("step_"))


def test_every_step_stands_once(interrupted: Interrupted) -> None:
    assert commands.steps(interrupted.path) == list(range(1, STEPS + 1))


def test_lost_steps_are_kept_in_the_attempt_that_did_them_again(interrupted: Interrupted) -> None:
    resumed_from = [0, SAVE_INTERVAL, _newest(interrupted.kills[2])]
    assert resumed_from[2] >= 2 * SAVE_INTERVAL
    for attempt, (kill, begin) in enumerate(zip(interrupted.kills, resumed_from, strict=True), start=2):
        removed = read_rows(interrupted.path / "attempts" / f"{attempt:03d}" / "removed_metrics.jsonl")
        assert [row["step"] for row in removed] == list(range(begin + 1, kill.step + 1))
        assert {row["attempt"] for row in removed} == {attempt - 1}
    assert not (interrupted.path / "attempts" / "005" / "removed_metrics.jsonl").exists()


def test_no_process_outlives_a_launcher_that_is_killed(interrupted: Interrupted) -> None:
    for kill in interrupted.kills:
        assert kill.code == -signal.SIGKILL
        assert kill.processes >= NUM_PROCESSES, "`interrupt` then saw all of them go"


def test_a_checkpoint_that_a_kill_left_half_written_is_never_used_and_removed(interrupted: Interrupted) -> None:
    half_written = interrupted.kills[1].checkpoints
    assert half_written == [".writing_step_00000006", "latest", "step_00000003"]
    removed = commands.events(interrupted.path, "checkpoint_removed")
    left = [name for kill in interrupted.kills for name in kill.checkpoints if name.startswith(".")]
    assert [Path(row["data"]["path"]).name for row in removed if row["data"].get("reason")] == left
    assert commands.checkpoints(interrupted.path)[-1] == f"step_{STEPS:08d}"
    assert not [name for name in commands.checkpoints(interrupted.path) if name.startswith(".")]


def test_sigterm_saves_at_the_next_step_and_leaves_with_75(interrupted: Interrupted) -> None:
    stop = interrupted.stop
    assert (stop.code, stop.state) == (75, "stopped")
    assert stop.checkpoints[-1] == f"step_{stop.step:08d}"
    assert stop.step < STEPS
    resumed = commands.events(interrupted.path, "resume")[-1]
    assert (resumed["attempt"], resumed["step"]) == (5, stop.step)


def test_a_run_without_a_checkpoint_says_so_once_and_starts_at_step_0(
    uninterrupted: Path, interrupted: Interrupted
) -> None:
    assert [row["step"] for row in commands.events(uninterrupted, "no_checkpoint")] == [0]
    assert [row["attempt"] for row in commands.events(interrupted.path, "no_checkpoint")] == [1, 2]
    assert "attempt 5" in interrupted.last.out and "no checkpoint" not in interrupted.last.out
