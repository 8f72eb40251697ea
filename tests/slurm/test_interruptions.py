"""What Slurm itself does to a job: a node dies, the time limit comes, a job is launched twice."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from shardwright.pretrain.events import read_rows

from .conftest import Slurm
from .test_submit import ONE_RANK, PLANTED, SMALL, TWO_NODES, losses, rows, starts, status, verdicts

LONG = ("schedule.train_iters=5000", "checkpoint.save_interval=0")
TWO_BY_TWO = ("cluster.nodes=2", "cluster.ranks=4", "schedule.train_iters=220")
"""The quickstart's tensor parallelism inside of each node, data parallelism over them; some steps."""
SLOWLY = ("cluster.setup=['export PLANTED_FAULT=*:1:is_slow']",)
"""Half a second and more for each step, so that what interrupts a run finds it at work."""


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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, slurm: Slurm) -> list[tuple[int, float]]:
    """Losses of four ranks on two nodes that nothing stops."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    slurm.wait(slurm.submit(*SMALL, *TWO_BY_TWO, f"run.dir={run}"), run)
    return losses(run)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs find the faults that tests plant."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")])))


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_four_ranks_lose_nothing_by_a_signal_a_requeue_and_a_killed_slurmd(
    run: Path, slurm: Slurm, undisturbed: list[tuple[int, float]]
) -> None:
    job = slurm.submit(*SMALL, *TWO_BY_TWO, *SLOWLY, f"run.dir={run}", "checkpoint.save_interval=10")
    slurm.wait_for(lambda: len(rows(run)) >= 10, run)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.wait_for(lambda: len(starts(run)) == 2 and len(rows(run)) >= 40, run)
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(lambda: len(starts(run)) == 3 and len(rows(run)) >= 70, run)
    kill_slurmd(slurm, "n2", run)
    slurm.wait(job, run)
    assert status(run)["state"] == "done"
    assert len(starts(run)) == 4 and starts(run) == sorted(starts(run))
    assert losses(run) == undisturbed


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_the_time_limit_is_met_by_saving_and_going_on_in_the_next_job(
    run: Path, slurm: Slurm, undisturbed: list[tuple[int, float]]
) -> None:
    limits = ("cluster.time=3", "cluster.signal_seconds=60", "checkpoint.save_interval=0")
    job = slurm.submit(*SMALL, *TWO_BY_TWO, *SLOWLY, f"run.dir={run}", *limits)
    slurm.wait_for(lambda: len(starts(run)) == 2, run)
    slurm.wait_for(lambda: len(rows(run)) >= 130, run)
    slurm.wait(job, run)
    assert status(run)["state"] == "done"
    assert len(starts(run)) >= 2 and starts(run) == sorted(starts(run))
    assert verdicts(run)[0] == ("stopped", True)
    assert losses(run) == undisturbed


def rank_of(job: str, rank: int) -> int:
    """Process of a rank: leader of a group of its own, which its children and its guardian are not."""
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode(), b"SLURM_STEP_ID=0"}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid, environ = int(entry.name), set((entry / "environ").read_bytes().split(b"\0"))
            if marks <= environ and os.getpgid(pid) == pid and (entry / "comm").read_text() != "rank-guardian\n":
                return pid
    raise AssertionError(f"no process of rank {rank} in job {job}")


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_node_and_stacks_and_the_job_goes_on(run: Path, slurm: Slurm) -> None:
    limits = ("resilience.step_timeout_seconds=15", "checkpoint.save_interval=5")
    job = slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", *LONG[:1], *limits)
    slurm.wait_for(lambda: (run / "checkpoints" / "step_00000005" / "COMMITTED").exists(), run)
    stopped = rank_of(job, 1)
    os.kill(stopped, signal.SIGSTOP)
    slurm.wait_for(lambda: status(run)["state"] == "failed", run)
    slurm.wait_for(lambda: len(starts(run)) == 2, run)
    slurm.shardwright("submit", "cancel", "--now", str(run))
    slurm.wait(job, run)
    assert starts(run)[1] >= 5 and not Path(f"/proc/{stopped}").exists()
    verdict = next(row["data"] for row in read_rows(run / "events.jsonl") if row["kind"] == "verdict")
    assert (verdict["cause"], verdict["requeue"], verdict["nodes"], verdict["exit_code"]) == ("hang", True, ["n2"], 3)
    assert verdict["reason"].startswith("rank 1 on n2: hangs: no sign for 1") and "it is stopped" in verdict["reason"]
    for rank in (0, 1):
        log = (run / "attempts" / "001" / "logs" / f"rank_{rank:05d}.log").read_text()
        assert "the watch: no sign for" in log and "most recent call first" in log


def kill_slurmd(slurm: Slurm, node: str, run: Path) -> None:
    """Kill a node's daemon, and start it again once Slurm knows that the node is down."""
    root = Path(os.environ["SLURM_CONF"]).parent
    os.kill(int((root / "run" / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)
    slurm.wait_for(lambda: slurm.run("sinfo", "-h", "-n", node, "-o", "%t").startswith("down"), run)
    subprocess.run(["slurmd", "-N", node], check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"})


@pytest.mark.slow
def test_a_run_goes_on_after_the_slurmd_of_one_of_its_nodes_was_killed(run: Path, slurm: Slurm) -> None:
    job = slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", *LONG[:1], "checkpoint.save_interval=5")
    slurm.wait_for(lambda: (run / "checkpoints" / "step_00000005" / "COMMITTED").exists(), run)
    kill_slurmd(slurm, "n2", run)
    slurm.wait_for(lambda: len(starts(run)) == 2, run)
    slurm.shardwright("submit", "cancel", "--now", str(run))
    slurm.wait(job, run)
    assert starts(run)[1] >= 5
    assert verdicts(run)[0][1], "queued again"


@pytest.mark.slow
def test_a_run_leaves_before_the_time_limit_by_itself_where_slurm_gives_no_signal(run: Path, slurm: Slurm) -> None:
    limits = ("cluster.time=2", "cluster.signal_seconds=0", "resilience.exit_before=50")
    job = slurm.submit(*SMALL, *ONE_RANK, f"run.dir={run}", "schedule.train_iters=100000", *limits)
    slurm.wait_for(lambda: len(starts(run)) == 2, run)
    slurm.shardwright("submit", "cancel", "--now", str(run))
    slurm.wait(job, run)
    first, second = starts(run)
    assert first == 0 < second
    assert verdicts(run)[0] == ("stopped", True)


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_node_that_preflight_finds_unfit_trains_nothing_and_is_left_out_of_the_next_try(
    run: Path, slurm: Slurm
) -> None:
    fault = "cluster.setup=['[ $SLURM_RESTART_COUNT ] || export PLANTED_FAULT=0:0:computes_wrongly']"
    examined = (*SMALL, *ONE_RANK, f"run.dir={run}", "schedule.train_iters=3", "cluster.preflight=true", fault)
    slurm.wait(slurm.submit(*examined), run)
    assert verdicts(run) == [("preflight", True), ("done", False)]
    (bad,) = json.loads(next(run.glob("preflight-*-0.json")).read_text())["bad_nodes"]
    assert (run / "excluded_nodes").read_text() == f"{bad['node']}\n"
    assert len(starts(run)) == 1


@pytest.mark.slow
def test_where_requeues_are_forbidden_the_next_job_of_a_chain_goes_on_and_the_last_begins_nothing(
    run: Path, slurm: Slurm
) -> None:
    chain = ("cluster.requeue=false", "cluster.chain=3", "checkpoint.save_interval=0", "schedule.train_iters=60")
    first = slurm.submit(*SMALL, *ONE_RANK, f"run.dir={run}", *chain)
    jobs = [json.loads(line)["job"] for line in (run / "jobs.jsonl").read_text().splitlines()]
    assert len(jobs) == 3 and jobs[0] == first
    slurm.wait_for(lambda: len(rows(run)) >= 3, run)
    slurm.run("scancel", "--signal=USR1", "--batch", first)
    for job in jobs:
        slurm.wait(job, run)
    assert status(run)["state"] == "done"
    assert [step for step, _ in losses(run)] == list(range(1, 61))
    assert verdicts(run)[:2] == [("stopped", True), ("done", False)]
    assert len(starts(run)) == 2, "the third job finds nothing left to do"


@pytest.mark.slow
def test_a_controller_that_is_killed_after_a_submission_spoils_no_run(run: Path, slurm: Slurm) -> None:
    steps = ("schedule.train_iters=40", "checkpoint.save_interval=0")
    job = slurm.submit(*SMALL, *ONE_RANK, f"run.dir={run}", *steps)
    root = Path(os.environ["SLURM_CONF"]).parent
    os.kill(int((root / "run" / "slurmctld.pid").read_text()), signal.SIGKILL)
    subprocess.run(["slurmctld"], check=True, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"})
    slurm.wait_for(lambda: (run / "status.json").exists() and status(run)["state"] == "done", run)
    slurm.wait(job, run)
    assert [step for step, _ in losses(run)] == list(range(1, 41))
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_00000040"]


@pytest.mark.slow
def test_a_spare_node_takes_the_place_of_one_that_is_lost_inside_of_the_job(run: Path, slurm: Slurm) -> None:
    pytest.importorskip("nvidia_resiliency_ext.fault_tolerance", reason="the extra `resilience` is not installed")
    spare = ("cluster.launcher=ft_launcher", "cluster.spare_nodes=1", "cluster.in_job_restarts=2")
    job = slurm.submit(*SMALL, *TWO_NODES, f"run.dir={run}", *LONG[:1], "checkpoint.save_interval=10", *spare)
    slurm.wait_for(lambda: (run / "checkpoints" / "step_00000010" / "COMMITTED").exists(), run)
    os.kill(agent_parent_of(run, rank=1), signal.SIGKILL)
    slurm.wait_for(lambda: len(starts(run)) == 2 and rows(run)[-1]["attempt"] == 2, run)
    slurm.shardwright("submit", "cancel", str(run))
    slurm.wait(job, run)
    first, second = starts(run)
    assert first == 0 and second >= 10
    assert status(run)["state"] == "stopped", "all within one job, and saved"
    assert [verdict for verdict, _ in verdicts(run)] == ["cancelled"]


def agent_parent_of(run: Path, rank: int) -> int:
    """Process id of the task of srun on the node where a rank of `run` trains."""
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or f"run.dir={run}".encode() not in (entry / "cmdline").read_bytes():
                continue
            if f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                agent = parent(parent(int(entry.name))) if is_guardian(entry) else parent(int(entry.name))
                return parent(agent)
        except OSError:
            continue
    raise AssertionError(f"rank {rank} is not found")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_guardian(entry: Path) -> bool:
    return (entry / "comm").read_text().startswith("rank-guardian")
