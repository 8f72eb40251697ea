"""Two incarnations of one job on machines whose file system does not share locks: one of them writes, always.

The first one is a process of its own, on "n1"; the test is the second one, on "n2". flock is switched off in both.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.conf.problems import RefusedError
from shardwright.pretrain import folder as folders
from shardwright.pretrain.folder import RunFolder

FIRST = """
import sys
from pathlib import Path
from shardwright.pretrain import folder as folders
from shardwright.pretrain.folder import Fence, RunFolder, SupersededError

folders.BEAT_SECONDS = 0.05
RunFolder._try_lock = lambda *arguments: True
run = RunFolder(Path(sys.argv[1]))
run.create()
with run.lock(0):
    attempt = run.new_attempt("", {})
    run.write_status("running", attempt)
    fence = Fence(run, attempt)
    print("holds", flush=True)
    for line in sys.stdin:
        if line == "conclude\\n":
            run.write_status("stopped", attempt)
        try:
            fence.check(now=True)
            print("writes", flush=True)
        except SupersededError as error:
            print(error, flush=True)
"""


class First:
    """The first incarnation."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", FIRST, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SLURMD_NODENAME": "n1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "holds\n"

    def ask(self, what: str = "check") -> str:
        """Let it look at its fence; what it says."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(RunFolder, "_try_lock", lambda *arguments: True)
    monkeypatch.setattr(folders, "SILENT_SECONDS", 2.0)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    return RunFolder(tmp_path / "run")


@pytest.fixture
def first(run: RunFolder) -> Iterator[First]:
    incarnation = First(run.path)
    yield incarnation
    incarnation.process.kill()
    incarnation.process.wait()


def test_the_second_leaves_by_itself_while_the_first_lives(run: RunFolder, first: First) -> None:
    with pytest.raises(RefusedError, match=r"another process trains there: pid \d+ on n1"), run.lock(0):
        pass
    assert first.ask() == "writes\n"


def test_a_first_one_that_comes_back_after_it_was_taken_for_dead_writes_nothing_more(
    run: RunFolder, first: First
) -> None:
    first.process.send_signal(signal.SIGSTOP)
    with run.lock(0) as lock:
        assert lock.waited, "what was read before is out of date"
        attempt = run.new_attempt("", {})
        run.write_status("running", attempt)
        first.process.send_signal(signal.SIGCONT)
        assert "another process has taken over" in first.ask()
        assert run.is_held_by(attempt)
    assert run.status()["attempt_id"] == attempt.id


def test_nobody_waits_for_one_that_has_concluded(run: RunFolder, first: First) -> None:
    first.ask("conclude")
    with run.lock(0) as lock:
        assert not lock.waited


def test_of_two_that_begin_an_attempt_at_the_same_moment_one_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.create()

    def other_is_faster(num_bytes: int) -> str:
        (run.attempts / "001").mkdir(exist_ok=True)
        return "0" * num_bytes

    with run.lock(0):
        monkeypatch.setattr(secrets, "token_hex", other_is_faster)
        with pytest.raises(RefusedError, match="another process has begun attempt 1"):
            run.new_attempt("", {})


def test_the_holder_is_on_record_by_slurms_name_of_its_node(run: RunFolder) -> None:
    run.create()
    with run.lock(0):
        assert json.loads(run.lock_info.read_text())["host"] == "n2"
