"""What happened to a launch, and whether the job is queued again: read from what a run's folder holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import checkpoint_store, cli, decision, diagnosis, explain, faults
from shardwright.pretrain.events import EventLog, JsonLines, now, read_rows
from shardwright.pretrain.faults import Failure
from shardwright.pretrain.folder import Attempt, RunFolder

FAILURE = Failure(rank=1, host="n2", exit_code=1, error_type="ValueError", error="no", traceback=None, time=1.0)

ECC = replace(FAILURE, error_type="RuntimeError", error="CUDA error: uncorrectable ECC error encountered")


class Job:
    """A Slurm job of one run, whose ranks are played: attempts are written as ranks write them."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.folder, self.restart = RunFolder(path), -1
        self.folder.create()
        self.text = compose.dump(compose.compose([f"run.dir={path}", *overrides]))
        self.folder.freeze(self.text, [])

    def environ(self) -> dict[str, str]:
        return {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": str(self.restart)}

    def begin(self) -> Attempt:
        """Start the ranks once more."""
        self.restart += 1
        with self.folder.lock(0):
            launch_id = f"slurm 42.0, restart {self.restart}"
            attempt = self.folder.new_attempt(self.text, {"launcher": "srun", "launch_id": launch_id})
        self.folder.write_status("running", attempt)
        return attempt

    def train(self, attempt: Attempt, first: int, last: int) -> None:
        lines = JsonLines(self.folder.metrics)
        for step in range(first, last + 1):
            lines.append({"step": step, "loss": 1.0, "step_seconds": 0.5, "time": now(), "attempt": attempt.number})

    def save(self, step: int) -> None:
        temporary = checkpoint_store.begin(self.folder.checkpoints, step)
        checkpoint_store.commit(temporary, {"step": step}, {})

    def printed(self, *lines: str) -> None:
        with (self.folder.path / "slurm-42.log").open("a") as log:
            log.write("\n".join(["", f"== job 42, restart {self.restart}, on n[1-2], now", *lines, ""]))

    def decide(self, code: int = 1, *, told: bool = False) -> int:
        return decision.decide(self.folder.path, str(code), told=told, environ=self.environ())

    def verdict(self) -> diagnosis.Verdict:
        return diagnosis.verdicts(read_rows(self.folder.events))[-1]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (replace(FAILURE, error_type="OSError", error="[Errno 28] No space left on device: '/x'"), "disk_full"),
        (replace(FAILURE, error_type="OSError", error="[Errno 122] Disk quota exceeded"), "disk_full"),
        (replace(FAILURE, error_type="OutOfMemoryError", error="CUDA out of memory. Tried to allocate"), "memory_gpu"),
        (replace(FAILURE, error_type="MemoryError", error="MemoryError"), "memory_host"),
        (replace(FAILURE, error_type="RuntimeError", error="CUDA error: uncorrectable ECC error"), "hardware"),
        (replace(FAILURE, error_type="TrainingFault", error="the loss is nan on rank 1", exit_code=3), "not_finite"),
        (replace(FAILURE, error_type="TrainingFault", error="the self-check failed", exit_code=3), "training"),
        (replace(FAILURE, error_type="RefusedError", error="there is no such file", exit_code=2), "configuration"),
        (replace(FAILURE, error_type="DamagedError", error="digest", exit_code=4), "damaged"),
        (replace(FAILURE, error_type="DistBackendError", error="NCCL error: remote exit", exit_code=3), "network"),
        (replace(FAILURE, error_type="DistBackendError", error="watchdog timeout", exit_code=3), "timeout"),
        (replace(FAILURE, error_type="RuntimeError", error="Connection closed by peer", exit_code=3), "network"),
        (replace(FAILURE, error_type=None, error="killed by SIGKILL", exit_code=3), "lost_rank"),
        (FAILURE, "code"),
    ],
)
def test_the_cause_is_read_from_the_error(failure: Failure, cause: str) -> None:
    assert diagnosis.cause_of(failure) == cause


def test_a_run_that_stopped_and_saved_is_queued_again_for_as_long_as_it_trains_on(job: Job) -> None:
    for saved in range(1, 12):
        attempt = job.begin()
        job.train(attempt, saved, saved)
        job.save(saved)
        job.folder.write_status("stopped", attempt, exit_code=75, step=saved)
        assert job.decide(75, told=True) == decision.QUEUE_AGAIN


def test_a_run_that_is_stopped_again_and_again_before_its_first_step_is_not(job: Job) -> None:
    answers = []
    for _ in range(4):
        job.folder.write_status("stopped", job.begin(), exit_code=75, step=0)
        answers.append(job.decide(75, told=True))
    assert answers == [decision.QUEUE_AGAIN] * 3 + [75]
    assert "3 times in a row without a new checkpoint" in job.verdict().reason


def test_an_error_that_comes_back_at_its_step_is_tried_twice(job: Job) -> None:
    answers = []
    for _ in range(2):
        attempt = job.begin()
        job.train(attempt, 1, 2)
        FAILURE.write(attempt.errors)
        job.folder.write_status("failed", attempt, exit_code=1)
        answers.append(job.decide(15))
    assert answers == [decision.QUEUE_AGAIN, 1]
    assert "two attempts in a row ended like this after step 2" in job.verdict().reason


def test_what_will_not_pass_is_not_tried_again(job: Job) -> None:
    attempt = job.begin()
    replace(FAILURE, error_type="TrainingFault", error="update 1: the loss is nan", exit_code=3).write(attempt.errors)
    assert job.decide(15) == 3


def test_no_job_is_queued_again_where_the_configuration_forbids_it(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", "cluster.requeue=false")
    job.folder.write_status("stopped", job.begin(), exit_code=75, step=0)
    assert job.decide(75, told=True) == 75


def test_ranks_that_were_refused_before_an_attempt_began_end_the_job_with_what_they_said(job: Job) -> None:
    job.restart = 0
    refused = Problem(key="data.files", value="[x.txt]", rule="there is no such file")
    job.printed(str(RefusedError([refused])), "srun: error: n1: task 0: Exited with exit code 2")
    assert job.decide(15) == 2
    assert job.verdict().reason == str(refused)


def test_a_task_that_vanished_is_named_by_what_srun_says_and_not_its_victims(job: Job) -> None:
    job.begin()
    job.printed(
        "srun: error: n2: task 1: Exited with exit code 7",
        "srun: error: n1: task 0: Terminated",
    )
    assert job.decide(15) == decision.QUEUE_AGAIN
    assert (job.verdict().cause, job.verdict().reason) == ("lost_rank", "rank 1 on n2: Exited with exit code 7")


def test_a_node_is_to_blame_for_its_hardware_at_once_and_for_a_lost_rank_when_it_loses_another(job: Job) -> None:
    lost = replace(FAILURE, error_type=None, error="killed by SIGKILL", exit_code=3)
    blamed = []
    for step, failure in enumerate([lost, replace(lost, host="n3"), replace(lost, host="n3"), FAILURE, ECC], start=1):
        attempt = job.begin()
        job.train(attempt, step, step)
        failure.write(attempt.errors)
        job.decide(15)
        blamed.append(job.verdict().nodes)
    assert blamed == [(), (), ("n3",), (), ("n2",)]


def test_a_hang_blames_the_node_of_the_rank_that_the_others_wait_for_and_none_where_all_are_alike(job: Job) -> None:
    blamed: list[tuple[str, tuple[str, ...]]] = []
    for positions in ([(1, 17, 1), (1, 17, 0)], [(1, 17, 1), (1, 16, 1)], [(1, 17, 0), (0, 17, 0)], [(1, 17, 1)] * 2):
        attempt = job.begin()
        job.train(attempt, 1, 1 + len(blamed))
        job.save(1 + len(blamed))
        for rank, position in enumerate(positions):
            hung = replace(FAILURE, rank=rank, host=f"n{rank}", error_type=faults.HANG, exit_code=3, position=position)
            hung.write(attempt.errors)
        assert job.decide(15) == decision.QUEUE_AGAIN
        blamed.append((job.verdict().cause, job.verdict().nodes))
    assert blamed == [("hang", ("n1",))] * 3 + [("hang", ())]
    assert "ranks 1 stand at the same place" in job.verdict().reason


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE)", "timeout"),
        ("NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered", "hardware"),
        ("nothing of interest", "lost_rank"),
    ],
)
def test_of_a_rank_that_a_library_aborted_the_end_of_its_log_says_why(job: Job, words: str, cause: str) -> None:
    attempt = job.begin()
    attempt.log(1).write_text(f"{words}\nterminate called after throwing an instance of 'c10::DistBackendError'\n")
    job.printed("srun: error: n2: task 1: Aborted (core dumped)", "srun: error: n1: task 0: Terminated")
    assert job.decide(15) == decision.QUEUE_AGAIN
    assert job.verdict().cause == cause


def test_a_verdict_of_an_earlier_version_names_no_nodes(job: Job) -> None:
    data = {"launch": "42, restart 0", "cause": "code", "reason": "", "saved": 0, "requeue": True, "exit_code": 1}
    EventLog(job.folder.events, attempt=1, rank=None).write("verdict", 3, **data)
    assert (job.verdict().step, job.verdict().nodes) == (3, ())


def test_a_job_that_slurm_ended_is_no_fault_of_the_rank_that_says_so(job: Job) -> None:
    attempt = job.begin()
    replace(FAILURE, error_type="BrokenPipeError", error="Broken pipe", exit_code=3).write(attempt.errors)
    job.printed("slurmstepd-n1: error: *** JOB 42 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***")
    assert job.decide(143) == decision.QUEUE_AGAIN
    assert job.verdict().reason == "Slurm ended the job on n1: time limit"


def test_a_launch_that_slurm_ended_without_asking_is_judged_by_the_next_one_before_its_ranks(job: Job) -> None:
    answers = []
    for _ in range(5):
        environ = {**job.environ(), "SLURM_RESTART_COUNT": str(job.restart + 1)}
        answers.append(decision.decide(job.folder.path, "before", told=False, environ=environ))
        job.begin()
    assert answers == [0, 0, 0, 0, 1], "the first start and three requeues"


def test_a_job_that_slurm_launched_twice_is_not_queued_again_by_its_second_incarnation(job: Job) -> None:
    job.begin()
    job.printed("refused: 1 problem", "  - run.dir=x: another process trains there: pid 7 on n1; wait for it")
    assert job.decide(2) == 2
    assert (job.verdict().cause, job.verdict().reason) == ("occupied", "another process trains there: pid 7 on n1")


def test_a_cancelled_run_is_not_queued_again(job: Job) -> None:
    job.folder.write_status("stopped", job.begin(), exit_code=75, step=0)
    (job.folder.path / "cancel").touch()
    assert job.decide(75, told=True) == 75


def test_explain_counts_lost_steps_and_the_share_of_time_that_counts(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    first = job.begin()
    job.train(first, 1, 5)
    FAILURE.write(first.errors)
    job.decide(15)
    second = job.begin()
    job.folder.cut_metrics(2, second)
    EventLog(job.folder.events, attempt=2, rank=0).write("start", 2)
    job.train(second, 3, 6)
    EventLog(job.folder.events, attempt=2, rank=0).write("checkpoint", 6, seconds=40.0, stall_seconds=1.5)
    story = explain.read(job.folder)
    assert [(attempt.start_step, attempt.last_step, attempt.lost) for attempt in story.attempts] == [
        (None, 5, 3),
        (2, 6, 0),
    ]
    assert story.attempts[1].seconds["saving"] == 1.5, "what is written beside training takes nothing from it"
    assert story.goodput == pytest.approx(6 * 0.5 / story.wall_seconds)
    assert cli.main(["explain", str(job.folder.path)]) == 0
    told = capsys.readouterr().out
    assert "3 steps trained twice" in told and "code: rank 1" in " ".join(told.split())


def test_explain_of_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "no run lives there" in capsys.readouterr().err


class Chain:
    """Jobs of a chain, each after the one before."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def begins(self, job: str, after: str) -> bool:
        environ = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "0"}
        return decision.decide(self.job.folder.path, "before", told=False, after=after, environ=environ) == 0


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(Job(tmp_path / "run", "cluster.requeue=false", "cluster.chain=3"))


def test_the_next_job_of_a_chain_goes_on_with_what_may_pass(chain: Chain) -> None:
    attempt = chain.job.begin()
    chain.job.train(attempt, 1, 4)
    chain.job.save(4)
    chain.job.printed("stopped")
    chain.job.folder.write_status("stopped", attempt, exit_code=75, step=4)
    assert chain.job.decide(0, told=True) == decision.QUEUE_AGAIN, "which a chain's script takes for: the next one"
    assert chain.begins("43", after="42")


def test_the_next_job_of_a_chain_judges_one_that_slurm_ended_without_asking(chain: Chain) -> None:
    attempt = chain.job.begin()
    chain.job.train(attempt, 1, 4)
    chain.job.printed("slurmstepd: error: *** JOB 42 ON n1 CANCELLED AT now DUE TO TIME LIMIT ***")
    assert chain.begins("43", after="42")
    assert (chain.job.verdict().launch, chain.job.verdict().cause) == ("42, restart 0", "interrupted")


def test_no_job_of_a_chain_begins_after_what_will_not_pass_also_where_one_between_was_cancelled(chain: Chain) -> None:
    attempt = chain.job.begin()
    replace(FAILURE, error="[Errno 28] No space left on device").write(attempt.errors)
    chain.job.printed("failed")
    chain.job.folder.write_status("failed", attempt, exit_code=1)
    assert chain.job.decide(15) == 1
    assert not chain.begins("43", after="42")
    assert not chain.begins("44", after="43")


def test_the_job_after_a_finished_run_ends_well(chain: Chain) -> None:
    attempt = chain.job.begin()
    chain.job.printed("finished")
    chain.job.folder.write_status("done", attempt, exit_code=0)
    assert chain.job.decide(0) == 0
    assert chain.begins("43", after="42"), "its ranks say that nothing is left to do"


def test_a_node_that_is_not_fit_is_left_out_of_the_next_try(job: Job) -> None:
    job.restart = 0
    report = job.folder.path / "preflight-42-0.json"
    report.write_text(json.dumps({"fit": True, "bad_nodes": [], "group": None}))
    environ = job.environ()
    assert decision.decide(job.folder.path, "preflight", told=False, environ=environ) == 0
    bad = [{"node": "n2", "reasons": ["gemm: 3 rows are wrong"]}]
    report.write_text(json.dumps({"fit": False, "bad_nodes": bad, "group": None}))
    assert decision.decide(job.folder.path, "preflight", told=False, environ=environ) == decision.QUEUE_AGAIN
    assert job.folder.excluded("n9") == "n9,n2"
    assert "n2: gemm: 3 rows are wrong" in job.verdict().reason
    report.unlink()
    answers = [decision.decide(job.folder.path, "preflight", told=False, environ=environ) for _ in range(3)]
    assert answers == [decision.QUEUE_AGAIN, decision.QUEUE_AGAIN, 5], "bounded by max_requeues"


def test_explain_shows_what_ranks_said_as_it_stands(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = job.begin()
    job.train(attempt, 1, 1)
    said = {"rank": 0, "host": "n1", "error": "[/pair.cc:547] closed :x:", "exit_code": 3}
    EventLog(job.folder.events, attempt=1, rank=0).write("fault", 1, **said)
    assert cli.main(["explain", str(job.folder.path)]) == 0
    assert "".join(["[/pair.cc:547]closed:x:"]) in "".join(capsys.readouterr().out.split())
