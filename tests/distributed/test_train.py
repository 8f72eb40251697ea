"""`shardwright train` on a folder that holds a run: finished, longer, changed, in another layout, from elsewhere."""

import hashlib
import shutil
from pathlib import Path

import pytest

from . import commands

LAYOUT_TOLERANCE = 1e-5
"""Relative, of a loss in fp32: another layout adds the same numbers in another order."""


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed."""
    return shutil.copytree(finished_run, tmp_path / "run")


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with the time of its last change and a digest, every folder with its time."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *folder.rglob("*")]
    }


def is_refused(ended: commands.Ended, *words: str) -> None:
    """Exit code 2, all `words`, no traceback and no rank."""
    assert ended.code == 2, ended.out
    assert [word for word in words if word not in ended.out] == []
    assert "Traceback" not in ended.out and "starting" not in ended.out


def test_a_finished_run_says_so_and_nothing_changes(finished_run: Path) -> None:
    before = contents(finished_run)
    ended = commands.train(finished_run)
    assert ended.code == 0
    assert "this run is finished" in ended.out and "12 of 12" in ended.out
    assert contents(finished_run) == before


def test_more_steps_continue_a_finished_run(copied_run: Path) -> None:
    before = (copied_run / "metrics.jsonl").read_bytes()
    ended = commands.train(copied_run, "schedule.train_iters=14")
    assert ended.code == 0, ended.out
    assert "schedule.train_iters" in ended.out and "12 -> 14" in ended.out
    assert (copied_run / "metrics.jsonl").read_bytes().startswith(before)
    assert commands.steps(copied_run) == list(range(1, 15))
    assert commands.checkpoints(copied_run)[-1] == "step_00000014"


def test_a_key_that_cannot_change_is_refused_and_nothing_changes(finished_run: Path) -> None:
    before = contents(finished_run)
    is_refused(commands.train(finished_run, "model.num_layers=4"), "model.num_layers", "started with 2")
    assert contents(finished_run) == before


def test_a_checkpoint_of_another_run_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    there = tmp_path / "other_runs"
    (there / "first").mkdir(parents=True)
    ended = commands.train(tmp_path / "run", *commands.SMALL, f"checkpoint.load={there / 'nope'}")
    is_refused(ended, "checkpoint.load", str(there / "nope"), "first")
    assert not (tmp_path / "run").exists()


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(finished_run: Path, tmp_path: Path) -> None:
    before = contents(finished_run)
    is_refused(commands.train(finished_run, "checkpoint.load_step=999"), "checkpoint.load_step", "steps 6, 12")
    assert contents(finished_run) == before
    ended = commands.train(
        tmp_path / "run", *commands.SMALL, f"checkpoint.load={finished_run}", "checkpoint.load_step=999"
    )
    is_refused(ended, "checkpoint.load_step", "steps 6, 12")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("parallel.tp=1", "parallel.sp=false", "cluster.ranks=1"), id="one rank"),
        pytest.param(("parallel.tp=1", "parallel.sp=false", "parallel.pp=2"), id="two pipeline stages"),
    ],
)
def test_a_run_goes_on_in_another_layout_with_the_same_samples(
    finished_run: Path, copied_run: Path, layout: tuple[str, ...]
) -> None:
    ended = commands.train(copied_run, *layout, "checkpoint.load_step=6")
    assert ended.code == 0, ended.out
    before, after = commands.rows(finished_run), commands.rows(copied_run)
    assert [row["attempt"] for row in after] == 6 * [1] + 6 * [2]
    assert [row["consumed_samples"] for row in after] == [4 * step for step in range(1, 13)]
    assert [row["tokens"] for row in after] == [row["tokens"] for row in before]
    assert [row["loss"] for row in after] == pytest.approx([row["loss"] for row in before], rel=LAYOUT_TOLERANCE)
    assert "superseded_by_attempt_002_step_00000012" in commands.checkpoints(copied_run)


def test_a_sweep_trains_every_point_in_a_folder_of_its_own(cache: str, tmp_path: Path) -> None:
    ended = commands.train(
        tmp_path / "run", *commands.SMALL, cache, "-m", "schedule.train_iters=2", "optimizer.lr=1e-3,2e-3"
    )
    assert ended.code == 0, ended.out
    points = sorted((tmp_path / "run_sweep").iterdir())
    assert [point.name for point in points] == ["0_optimizer.lr_0.001", "1_optimizer.lr_0.002"]
    assert [commands.steps(point) for point in points] == [[1, 2], [1, 2]]
    assert [commands.rows(point)[-1]["lr"] for point in points] == [1e-3, 2e-3]
