"""`shardwright train` as a rank of torchrun or srun: one run, one attempt, the same losses as with its own launcher."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from . import commands


def launch_of(run_dir: Path, attempt: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run_dir / "attempts" / f"{attempt:03d}" / "launch.json").read_text())
    return told


@pytest.fixture(scope="module")
def torchrun_run(tmp_path_factory: pytest.TempPathFactory, cache: str) -> "TorchrunRun":
    return TorchrunRun(tmp_path_factory.mktemp("torchrun") / "run", cache)


class TorchrunRun:
    """The finished run once more, but started by torchrun, whose agent is killed; then started by it again."""

    def __init__(self, run_dir: Path, cache: str) -> None:
        self.path = run_dir
        overrides = (*commands.FINISHED_RUN, cache, commands.ENDLESS)
        command = commands.start(run_dir, *overrides, command=commands.TORCHRUN)
        command.wait_for(lambda: 8 in commands.steps(run_dir))
        self.processes = len(command.processes())
        command.kill()
        self.left = command.left()
        self.frozen = self.frozen_config()
        self.last = commands.train(run_dir, "schedule.train_iters=12", command=commands.TORCHRUN)

    def frozen_config(self) -> tuple[int, int]:
        """Identity and last change of the frozen configuration."""
        stat = (self.path / "config.yaml").stat()
        return stat.st_ino, stat.st_mtime_ns


def test_under_torchrun_a_run_equals_the_one_with_its_own_launcher_also_after_a_kill(
    torchrun_run: TorchrunRun, finished_run: Path
) -> None:
    assert torchrun_run.last.code == 0, torchrun_run.last.out
    assert commands.trajectory(torchrun_run.path) == commands.trajectory(finished_run)


def test_no_rank_outlives_a_torchrun_that_is_killed(torchrun_run: TorchrunRun) -> None:
    assert torchrun_run.processes >= 1 + 2 * 2, "the agent, two ranks and their guardians"
    assert torchrun_run.left == []


def test_the_ranks_of_a_torchrun_share_one_attempt_and_freeze_the_configuration_once(torchrun_run: TorchrunRun) -> None:
    assert sorted(path.name for path in (torchrun_run.path / "attempts").iterdir()) == ["001", "002"]
    for attempt in (1, 2):
        assert launch_of(torchrun_run.path, attempt)["launcher"] == "torchrun"
        logs = torchrun_run.path / "attempts" / f"{attempt:03d}" / "logs"
        assert len(list(logs.iterdir())) == 2
    assert torchrun_run.frozen_config() == torchrun_run.frozen
    assert json.loads((torchrun_run.path / "status.json").read_text())["state"] == "done"


def test_a_task_of_srun_is_a_rank_and_goes_on_with_a_run(finished_run: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    one_task = {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost",
    }
    layout = ("parallel.tp=1", "parallel.sp=false", "cluster.ranks=1")
    ended = commands.train(run_dir, *layout, "schedule.train_iters=13", variables=one_task)
    assert ended.code == 0, ended.out
    assert commands.steps(run_dir) == list(range(1, 14))
    assert (launch_of(run_dir, 2)["launcher"], launch_of(run_dir, 2)["launch_id"]) == (
        "srun",
        "slurm 4242.0, restart 0",
    )
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
