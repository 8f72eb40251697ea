"""`shardwright submit` on a real Slurm: to the end, through preemption and requeue, as a sweep; and when not again.

A start of ranks costs half a minute on two cores, so a job is looked at from many sides. All jobs are put into the
queue at once by fixtures where they do not depend on each other.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwright.pretrain.events import read_rows

from .conftest import Slurm

PLANTED = Path(__file__).parents[1] / "distributed" / "planted"
SMALL = (
    "experiment=quickstart",
    "cluster=slurm",
    "cluster.gpu=none",
    "cluster.cpus=null",
    "cluster.export=[PYTHONPATH,PYTHONSAFEPATH,OMP_NUM_THREADS]",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.kv_channels=16",
    "model.vocab_size=500",
    "data.source=mock",
    "data.seq_length=64",
    "data.global_batch_size=4",
    "data.micro_batch_size=1",
    "schedule.lr_warmup_iters=2",
    "schedule.lr_decay_iters=60",
    "schedule.eval_iters=0",
    "telemetry.log_interval=1",
)
TWO_NODES = ("cluster.nodes=2", "cluster.ranks=2", "parallel.tp=1", "parallel.sp=false")
ONE_RANK = ("cluster.ranks=1", "parallel.tp=1", "parallel.sp=false")


def rows(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "metrics.jsonl")


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(run)]


def status(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "status.json").read_text())
    return content


def verdicts(run: Path) -> list[tuple[str, bool]]:
    """Cause, and whether the job was queued again."""
    found = [row["data"] for row in read_rows(run / "events.jsonl") if row["kind"] == "verdict"]
    return [(verdict["cause"], verdict["requeue"]) for verdict in found]


def starts(run: Path) -> list[int]:
    """The steps that the attempts began at."""
    return [row["step"] for row in read_rows(run / "events.jsonl") if row["kind"] == "start"]


def restarts(slurm: Slurm, job: str) -> int:
    (shown,) = (word for word in slurm.run("scontrol", "show", "job", job).split() if word.startswith("Restarts="))
    return int(shown.partition("=")[2])


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run that was stopped by a signal to its job, then by `scontrol requeue`, and went to its end."""

    run: Path
    job: str
    restarts: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, slurm: Slurm) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def interrupted(folder: Path, slurm: Slurm) -> Interrupted:
    run = folder / "interrupted"
    job = slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", "schedule.train_iters=60", "checkpoint.save_interval=0")
    slurm.wait_for(lambda: len(rows(run)) >= 3, run)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.wait_for(lambda: len(starts(run)) == 2 and rows(run)[-1]["attempt"] == 2, run)
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(lambda: len(starts(run)) == 3, run)
    number = restarts(slurm, job)
    slurm.wait(job, run)
    return Interrupted(run, job, number)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, slurm: Slurm) -> Path:
    run = folder / "uninterrupted"
    slurm.wait(slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", "schedule.train_iters=60"), run)
    return run


def test_a_run_that_was_preempted_and_requeued_equals_one_that_was_not(
    interrupted: Interrupted, uninterrupted: Path
) -> None:
    assert status(interrupted.run)["state"] == "done"
    assert losses(interrupted.run) == losses(uninterrupted)
    assert [step for step, _ in losses(uninterrupted)] == list(range(1, 61))


def test_a_signal_to_the_job_and_slurms_own_requeue_both_save_before_they_stop(interrupted: Interrupted) -> None:
    first, second, third = starts(interrupted.run)
    assert first == 0 < second < third, "each went on where the one before had stopped, without a saving interval"
    assert interrupted.restarts == 2
    assert [again for _, again in verdicts(interrupted.run)] == [True, True, False]
    assert verdicts(interrupted.run)[0] == ("stopped", True)
    assert verdicts(interrupted.run)[-1] == ("done", False)


def test_explain_tells_the_story_of_its_attempts(interrupted: Interrupted, slurm: Slurm) -> None:
    story = json.loads(slurm.shardwright("explain", str(interrupted.run), "--json"))
    assert [attempt["number"] for attempt in story["attempts"]] == [1, 2, 3]
    assert [attempt["launcher"] for attempt in story["attempts"]] == [
        f"slurm {interrupted.job}.0, restart {restart}" for restart in range(3)
    ]
    assert story["state"] == "done" and 0 < story["goodput"] < 1
    assert all(attempt["seconds"]["training"] > 0 for attempt in story["attempts"])


def test_under_torchrun_a_run_that_was_told_to_stop_goes_on_after_a_requeue(
    folder: Path, slurm: Slurm, uninterrupted: Path
) -> None:
    run = folder / "torchrun"
    steps = ("schedule.train_iters=60", "checkpoint.save_interval=0")
    job = slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", *steps, "cluster.launcher=torchrun")
    slurm.wait_for(lambda: len(rows(run)) >= 3, run)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(job, run)
    assert status(run)["state"] == "done"
    assert losses(run) == losses(uninterrupted)
    first, second = starts(run)
    assert first == 0 < second
    assert verdicts(run) == [("stopped", True), ("done", False)]


def test_a_node_with_bad_memory_is_left_out_of_the_next_try(
    folder: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")])))
    run = folder / "memory"
    fault = "cluster.setup=['[ $SLURM_RESTART_COUNT ] || export PLANTED_FAULT=0:2:has_bad_memory']"
    job = slurm.submit(*SMALL, *ONE_RANK, f"run.dir={run}", "schedule.train_iters=3", fault)
    slurm.wait(job, run)
    assert verdicts(run) == [("hardware", True), ("done", False)]
    first, second = re.findall(r"^== job .*, on (\S+),", (run / f"slurm-{job}.log").read_text(), re.MULTILINE)
    assert (run / "excluded_nodes").read_text() == f"{first}\n" and first != second


@pytest.fixture(scope="module")
def sweep(folder: Path, slurm: Slurm) -> Iterator[Path]:
    """Four points of two ranks each; the second one raises at its third step, in every attempt."""
    run = folder / "points"
    fault = "cluster.setup=['case $run in */1_*) export PLANTED_FAULT=0:3:raises ;; esac']"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")])))
        patch.chdir(folder)
        points = ("optimizer.lr=1e-3,2e-3,3e-3,4e-3", "run.dir=points", "schedule.train_iters=6", fault)
        job = slurm.submit("-m", *SMALL, *points, "cluster.array_limit=2")
        yield run.with_name("points_sweep")
        slurm.wait(job, folder)


def test_a_sweep_is_one_array_in_which_one_point_fails_and_is_given_up_and_the_others_finish(
    sweep: Path, slurm: Slurm
) -> None:
    points = [Path(point["folder"]) for point in json.loads((sweep / "sweep.json").read_text())]
    assert [point.name for point in points] == [f"{number}_optimizer.lr_0.00{number + 1}" for number in range(4)]
    (job,) = (json.loads(line)["job"] for line in (sweep / "jobs.jsonl").read_text().splitlines())
    slurm.wait(job, sweep)
    assert [status(point)["state"] for point in points] == ["done", "failed", "done", "done"]
    assert [verdicts(point) for point in points] == [
        [("done", False)],
        [("code", True), ("code", False)],
        [("done", False)],
        [("done", False)],
    ]
    assert "the planted error" in slurm.shardwright("explain", str(points[1]))
    assert "failed (exit code 1)" in slurm.shardwright("submit", "status", str(sweep))


def test_four_ranks_on_two_nodes_by_a_name_that_a_shell_would_run(folder: Path, slurm: Slurm) -> None:
    run = folder / "x$(touch c) 'y"
    name = "run.name='x$(touch c)`touch c`; touch c #'"
    where = "run.dir='" + str(run).replace("'", "\\'") + "'"
    job = slurm.submit(*SMALL, "cluster.nodes=2", "cluster.ranks=4", name, where, "schedule.train_iters=4")
    slurm.wait(job, folder)
    assert status(run)["state"] == "done", (run / f"slurm-{job}.log").read_text()
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4]
    assert not list(folder.rglob("c")) and not Path("c").exists()


@pytest.mark.parametrize("preset", ["dgx_h100", "dgx_h200", "dgx_b200", "gb200_nvl72", "slurm"])
def test_slurm_accepts_the_script_of_every_preset(preset: str, folder: Path, slurm: Slurm) -> None:
    script = folder / f"{preset}.sbatch"
    batch = ("precision=bf16", "data.global_batch_size=16", "data.micro_batch_size=1")
    printed = slurm.shardwright("submit", f"cluster={preset}", "cluster.nodes=2", *batch, "--dry-run")
    script.write_text(printed[printed.index("#!/bin/bash") :])
    slurm.run("sbatch", "--test-only", str(script))


def test_no_variable_but_the_named_ones_reaches_a_job(
    folder: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    monkeypatch.setenv("A_NAMED_ONE", "passed on")
    run = folder / "environment"
    prints = "cluster.setup=['env; exit 2']"
    words = [word for word in SMALL if not word.startswith("cluster.export")]
    job = slurm.submit(*words, *ONE_RANK, f"run.dir={run}", prints, "cluster.export=[A_NAMED_ONE]")
    slurm.wait(job, run)
    log = run / f"slurm-{job}.log"
    assert "A_NAMED_ONE=passed on" in log.read_text() and "hunter2" not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0, "nobody else may read what a job prints"
