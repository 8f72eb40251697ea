"""A rank that gives no sign is found from outside, its stacks are in its log, it is named, and the run ends with 3.

Two data-parallel ranks; rank 1 hangs at its third step, rank 0 then waits for it inside of a collective.
"""

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import commands

LIMIT_SECONDS = 8
"""Of a part of a step: far above what one takes here, with other processes beside."""


class HungRun:
    """A run in which rank 1 hangs, and all that can be known of it afterwards."""

    def __init__(
        self,
        run_dir: Path,
        *overrides: str,
        fault: str | None = None,
        at_step_2: Callable[[commands.Command], None] = lambda command: None,
        command: tuple[str, ...] = commands.TRAIN,
    ) -> None:
        started = commands.start(
            run_dir,
            *commands.SMALL,
            "cluster.ranks=2",
            "data=mock",
            "checkpoint.save_interval=0",
            "schedule.eval_interval=0",
            f"resilience.step_timeout_seconds={LIMIT_SECONDS}",
            commands.ENDLESS,
            *overrides,
            fault=fault,
            command=command,
        )
        started.wait_for(lambda: 2 in commands.steps(run_dir))
        at_step_2(started)
        ended = started.wait()
        self.code, self.out, self.left = ended.code, ended.out, started.left()
        self.status: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
        self.logs = [(run_dir / "attempts/001/logs" / f"rank_0000{rank}.log").read_text() for rank in (0, 1)]

    def ended_by_rank_1(self, said: str) -> None:
        """Everything says the same, and the stacks of both ranks are in their logs."""
        assert self.left == [], self.out
        assert (self.status["state"], self.status["exit_code"]) == ("failed", 3), self.status
        assert (self.status["error"]["rank"], self.status["error"]["host"]) == (1, socket.gethostname()), self.status
        found = re.match(r"hangs: no sign for (\d+) s in (.*)", self.status["error"]["error"])
        assert found and int(found[1]) >= LIMIT_SECONDS and said in found[2], self.status
        for log in self.logs:
            assert "the watch: no sign for" in log and "most recent call first" in log and "run_rank" in log


def stop(command: commands.Command) -> None:
    """Send SIGSTOP to rank 1, not to its guardian."""
    for pid in command.processes():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RANK=1" in environ and Path(f"/proc/{pid}/comm").read_text() != "rank-guardian\n":
            os.kill(pid, signal.SIGSTOP)


def test_a_stopped_rank_is_found_named_and_ended_with_its_stacks_in_the_log(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", at_step_2=stop)
    run.ended_by_rank_1("it is stopped, as by SIGSTOP")
    assert run.code == 3
    assert f"rank 1 on {socket.gethostname()} failed the run" in run.out and "hangs: no sign" in run.out


@pytest.mark.slow
def test_a_rank_that_hangs_in_python_is_named_with_the_line_and_not_the_one_that_waits_for_it(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", fault="1:3:sleeps")
    run.ended_by_rank_1("waiting for data of step 3, at sitecustomize.py:")
    assert run.code == 3


@pytest.mark.slow
def test_a_data_loader_that_never_answers_is_named(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", fault="1:3:gets_no_data")
    run.ended_by_rank_1("waiting for data of step 4")
    assert run.code == 3


@pytest.mark.slow
def test_under_torchrun_too_a_stopped_rank_is_named(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", at_step_2=stop, command=commands.TORCHRUN)
    run.ended_by_rank_1("it is stopped, as by SIGSTOP")
    assert run.code != 0


@pytest.mark.slow
def test_a_rank_that_all_the_others_wait_for_is_told_as_slow(tmp_path: Path) -> None:
    interval = ("telemetry.straggler_interval=4", "telemetry.straggler_share=0.3", "schedule.train_iters=6")
    ranks = ("cluster.ranks=2", "data=mock", "schedule.eval_interval=0", "checkpoint.save_interval=0")
    ended = commands.train(tmp_path / "run", *commands.SMALL, *ranks, *interval, fault="1:2:is_slow")
    assert ended.code == 0, ended.out
    (told,) = commands.events(tmp_path / "run", "straggler")
    assert (told["step"], told["data"]["ranks"], told["data"]["hosts"]) == (5, [1], [socket.gethostname()])
    assert told["data"]["own_seconds"][0] >= 0.5, "the planted sleep"
    assert f"slow: rank 1 on {socket.gethostname()}" in ended.out
