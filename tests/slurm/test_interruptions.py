"""What Slurm itself does to a job: a node dies, the time limit comes, a job is launched twice."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from .conftest import Slurm
from .test_submit import ONE_RANK, SMALL, TWO_NODES, losses, rows, starts, status, verdicts

LONG = ("schedule.train_iters=5000", "checkpoint.save_interval=0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_second_incarnation_leaves_by_itself_and_spoils_nothing(run: Path, slurm: Slurm) -> None:
    first = slurm.submit(*SMALL, *ONE_RANK, f"run.dir={run}", *LONG)
    slurm.wait_for(lambda: len(rows(run)) >= 2, run)
    second = slurm.run("sbatch", "--parsable", str(run / "job.sbatch")).strip()
    slurm.wait(second, run)
    assert "another process trains there" in (run / f"slurm-{second}.log").read_text()
    assert verdicts(run) == [("occupied", False)]
    slurm.shardwright("submit", "cancel", str(run))
    slurm.wait(first, run)
    steps = [step for step, _ in losses(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert (status(run)["state"], starts(run)) == ("stopped", [0])
    assert verdicts(run)[-1] == ("cancelled", False)
    assert (run / "checkpoints" / f"step_{len(steps):08d}" / "COMMITTED").exists(), "cancelled, but saved"


@pytest.mark.slow
def test_the_time_limit_is_met_by_saving_and_going_on_in_the_next_job(run: Path, slurm: Slurm) -> None:
    limits = ("cluster.time=3", "cluster.signal_seconds=60")
    job = slurm.submit(*SMALL, *ONE_RANK, f"run.dir={run}", "schedule.train_iters=100000", *limits)
    slurm.wait_for(lambda: len(starts(run)) == 2, run)
    slurm.shardwright("submit", "cancel", "--now", str(run))
    slurm.wait(job, run)
    first, second = starts(run)
    assert first == 0 < second
    assert verdicts(run)[0] == ("stopped", True)


@pytest.mark.slow
def test_a_run_goes_on_after_the_slurmd_of_one_of_its_nodes_was_killed(run: Path, slurm: Slurm) -> None:
    job = slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", *LONG[:1], "checkpoint.save_interval=5")
    slurm.wait_for(lambda: (run / "checkpoints" / "step_00000005" / "COMMITTED").exists(), run)
    root = Path(os.environ["SLURM_CONF"]).parent
    os.kill(int((root / "run" / "slurmd.n2.pid").read_text()), signal.SIGKILL)
    slurm.wait_for(lambda: slurm.run("sinfo", "-h", "-n", "n2", "-o", "%t").startswith("down"), run)
    subprocess.run(["slurmd", "-N", "n2"], check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"})
    slurm.wait_for(lambda: len(starts(run)) == 2, run)
    slurm.shardwright("submit", "cancel", "--now", str(run))
    slurm.wait(job, run)
    assert starts(run)[1] >= 5
    assert verdicts(run)[0][1], "queued again"
