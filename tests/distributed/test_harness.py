"""The rank harness itself: what it promises to every other test of this folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .harness import RankError, RunRanks


def sum_of_ranks(rank: int, num_ranks: int, store: str, scale: float) -> float:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    x = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def fail_on_rank_1(rank: int, num_ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    if rank == 1:
        raise ValueError("a wrong number")
    dist.barrier()


def end_in_silence(rank: int, num_ranks: int, store: str, how: str) -> None:
    if rank == 0:
        time.sleep(60)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def start_a_process_and(rank: int, num_ranks: int, store: str, pid_file: Path, then: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    pid_file.write_text(str(sleeper.pid))
    if then == "raise":
        raise ValueError("with a process running")


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_ranks_meet_and_their_results_come_back_in_rank_order(run_ranks: RunRanks) -> None:
    assert run_ranks(sum_of_ranks, 2, 0.5) == [1.5, 1.5]
    assert run_ranks(lambda rank, num_ranks, store: (rank, os.environ["RANK"]), 2) == [(0, "0"), (1, "1")]


def test_the_first_failing_rank_is_named_with_its_traceback(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*ValueError: a wrong number") as raised:
        run_ranks(fail_on_rank_1, 2)
    assert raised.value.rank == 1


@pytest.mark.parametrize(("how", "words"), [("exit", "ended with exit code 7"), ("kill", "killed by SIGKILL")])
def test_a_rank_that_dies_without_a_word_is_named(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    monkeypatch.setattr(f"{RankError.__module__}.GRACE_SECONDS", 0.2)
    with pytest.raises(RankError, match=rf"rank 1: {words}(.|\n)*rank 0: stopped"):
        run_ranks(end_in_silence, 2, how)


def test_a_result_that_cannot_be_pickled_is_the_error_of_its_rank(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*pickle"):
        run_ranks(lambda rank, num_ranks, store: lambda: rank, 1)


def test_ranks_that_hang_are_stopped_when_time_is_up(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"rank 0: not done after 0\.5 s"):
        run_ranks(lambda rank, num_ranks, store: time.sleep(60), 2, timeout_seconds=0.5)


@pytest.mark.parametrize("then", ["return", "raise"])
def test_processes_that_a_rank_started_end_with_the_case(run_ranks: RunRanks, tmp_path: Path, then: str) -> None:
    pid_file = tmp_path / "pid"
    try:
        run_ranks(start_a_process_and, 1, pid_file, then)
    except RankError:
        assert then == "raise"
    assert not is_running(int(pid_file.read_text()))
