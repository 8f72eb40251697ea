"""Ranks start, fail, stop and end together, and nothing of theirs is left. Real processes, without torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import faults, launch
from shardwright.pretrain.folder import Attempt, RunFolder

PROGRAM = Path(__file__).with_name("ranks_without_torch.py")
LIMIT_SECONDS = 30


class Launched:
    """A launcher in a process of its own."""

    def __init__(self, folder: Path, config: Path, *behaviours: str) -> None:
        self.folder = RunFolder(folder)
        self.attempt_path = folder / "attempts" / "001"
        command = [sys.executable, "-P", str(PROGRAM), str(folder), str(config), *behaviours]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.ranks = len(behaviours)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.folder.events.exists() and self.folder.events.read_text().count("ready") == self.ranks)

    def ended(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.attempt_path.glob("pid_*")]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(compose.dump(compose.compose([])))
    return path


@pytest.fixture
def start(tmp_path: Path, config: Path) -> Callable[..., Launched]:
    return lambda *behaviours: Launched(tmp_path / "run", config, *behaviours)


def test_ranks_that_end_well_end_the_run_with_0(start: Callable[..., Launched]) -> None:
    assert start("ends").ended() == (0, "")


def test_a_vanished_rank_ends_the_run_with_3_and_is_named_not_its_victim(start: Callable[..., Launched]) -> None:
    launched = start("victim", "dies", "deaf")
    code, out = launched.ended()
    assert code == 3
    assert out.startswith(f"1 {socket.gethostname()} exit code 7")
    assert not any(map(alive, launched.pids()))
    assert (launched.attempt_path / "errors" / "rank_00000.json").exists()
    assert faults.last_lines(launched.attempt_path / "logs" / "rank_00001.log") == ["last words"]


def test_a_training_fault_is_told_in_its_own_words_and_ends_other_ranks_and_their_children(
    start: Callable[..., Launched],
) -> None:
    launched = start("grandchild", "fault")
    code, out = launched.ended()
    assert (code, out) == (3, f"1 {socket.gethostname()} loss is nan at step 4\n")
    assert len(launched.pids()) == 3 and not any(map(alive, launched.pids()))
    failure = faults.read(launched.attempt_path / "errors", 1)
    assert failure and failure.traceback and "TrainingFault" in failure.traceback


@pytest.fixture
def start_impatient(tmp_path: Path) -> Callable[..., Launched]:
    """The same with a limit of one second for each phase."""
    path = tmp_path / "impatient.yaml"
    limits = [f"resilience.{phase}_timeout_seconds=1" for phase in ("start", "data", "load")]
    path.write_text(compose.dump(compose.compose(limits)))
    return lambda *behaviours: Launched(tmp_path / "run", path, *behaviours)


@pytest.mark.parametrize(
    ("behaviours", "said"),
    [
        (("stands", "stops"), "(it is stopped, as by SIGSTOP)"),
        (("stands", "is behind"), "in starting, at ranks_without_torch.py:"),
    ],
)
def test_of_ranks_that_hang_the_one_that_the_others_wait_for_is_named_and_all_are_ended_with_stacks_in_their_logs(
    start_impatient: Callable[..., Launched], behaviours: tuple[str, str], said: str
) -> None:
    launched = start_impatient(*behaviours)
    code, out = launched.ended()
    assert (code, launched.pids()) == (3, launched.pids()) and not any(map(alive, launched.pids()))
    assert out.startswith(f"1 {socket.gethostname()} hangs: no sign for ") and said in out
    for rank in (0, 1):
        log = (launched.attempt_path / "logs" / f"rank_{rank:05d}.log").read_text()
        assert "most recent call first" in log and "ranks_without_torch.py" in log


@pytest.mark.slow  # guardians that look a second apart describe their ranks a second apart: it wants free cores
def test_ranks_that_hang_at_the_same_place_are_told_so(start_impatient: Callable[..., Launched]) -> None:
    code, out = start_impatient("stands", "stands").ended()
    assert code == 3 and "ranks 1 stand at the same place, none is behind" in out


def test_a_rank_that_goes_on_after_its_limit_is_not_ended(start_impatient: Callable[..., Launched]) -> None:
    launched = start_impatient("dozes")
    assert launched.ended() == (0, "")
    assert "the watch: it goes on" in (launched.attempt_path / "logs" / "rank_00000.log").read_text()


def test_killing_the_launcher_ends_every_rank_and_grandchild_and_frees_the_folder(
    start: Callable[..., Launched],
) -> None:
    launched = start("grandchild", "deaf")
    launched.wait_until_ready()
    pids = launched.pids()
    assert len(pids) == 3 and all(map(alive, pids))
    with (
        pytest.raises(RefusedError, match=rf"pid {launched.process.pid} on {socket.gethostname()}"),
        launched.folder.lock(0),
    ):
        pass
    launched.process.kill()
    with launched.folder.lock(10):
        wait_for(lambda: not any(map(alive, pids)))
    launched.process.communicate()


def test_a_signal_lets_the_ranks_save_and_stop(start: Callable[..., Launched]) -> None:
    launched = start("trains", "trains")
    launched.wait_until_ready()
    launched.process.send_signal(signal.SIGUSR1)
    assert launched.ended() == (75, "")


def test_a_stop_that_comes_while_ranks_start_is_not_lost(start: Callable[..., Launched]) -> None:
    launched = start("trains")
    wait_for(lambda: (launched.attempt_path / "logs" / "rank_00000.log").exists())
    launched.process.send_signal(signal.SIGTERM)
    assert launched.ended() == (75, "")


def test_a_second_interrupt_kills(start: Callable[..., Launched]) -> None:
    launched = start("deaf")
    launched.wait_until_ready()
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launched.process.send_signal(signal.SIGINT)
    assert launched.ended()[0] == 1
    assert not any(map(alive, launched.pids()))


def test_a_program_that_cannot_start_is_a_lost_rank_with_its_words_in_the_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    with folder.lock() as lock:
        attempt: Attempt = folder.new_attempt("", {"device": "cpu", "load": []})
        command = (sys.executable, "-P", "-c", "import nothing_of_this_name")
        outcome = launch.launch(attempt, world_size=1, added={}, lock_fd=lock.fd, command=command)
    assert outcome.exit_code == 3
    assert "nothing_of_this_name" in faults.last_lines(attempt.log(0))[-1]


def test_ranks_get_what_is_not_set_and_nothing_else() -> None:
    assert launch.defaults({}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert launch.defaults({"GLOO_SOCKET_IFNAME": "eth0"}) == {}


def test_the_launcher_s_signal_handlers_are_given_back(tmp_path: Path) -> None:
    before = [signal.getsignal(signum) for signum in launch.STOP_SIGNALS]
    folder = RunFolder(tmp_path)
    folder.create()
    with folder.lock() as lock:
        attempt = folder.new_attempt("", {"device": "cpu", "load": []})
        assert launch.launch(attempt, world_size=1, added={}, lock_fd=lock.fd, command=("true",)).exit_code == 0
        assert os.fstat(lock.fd)
    assert [signal.getsignal(signum) for signum in launch.STOP_SIGNALS] == before
