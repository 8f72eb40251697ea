"""The hang watch: a rank that gives no sign for longer than its phase may take is described, then ended.

It runs in the guardian beside every rank (`guard`), a process of its own, because a rank that is stopped or sits in
native code cannot watch itself. Each guardian looks at its own rank's heartbeat once a second and needs nobody: nothing
is sent as long as all is well. In a hang all ranks fall silent within a step, since all soon wait for the one that
hangs. Each guardian then

1. has the rank's stacks written into its log (a signal that `faulthandler` answers in C, also while the main thread
   sits in native code), those of its children too, and on a GPU the flight recorder's trace;
2. writes the rank's error file: phase, step, how long, where the stack ends, and whether the process is stopped;
3. gives the other guardians a moment for the same, and kills the rank. The launcher ends the rest, as after every loss.
   A stopped rank writes its stacks only now, since it has to run for that.

`faults.culprit` then chooses among the error files. Time in which the guardian itself did not run does not count, so a
job that was suspended as a whole is not taken for a hang.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from shardwright.pretrain import faults
from shardwright.pretrain.conclusion import conclude
from shardwright.pretrain.events import EventLog
from shardwright.pretrain.faults import HANG, Failure
from shardwright.pretrain.folder import Attempt, RunFolder
from shardwright.pretrain.heartbeat import Heartbeat

PERIOD_SECONDS = 1.0
"""Between two looks of a guardian."""
STACKS = signal.SIGUSR2
"""Asks a rank for its stacks; `rank` registers the answer."""
_PATIENCE_SECONDS = 2.0
"""How long a process has to write its stacks."""
_STATES = {
    "T": "it is stopped, as by SIGSTOP",
    "t": "a debugger holds it",
    "D": "it waits for a device or disk",
}
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
_WAITING = re.compile(r"/torch/distributed/|/(p2p_communication|param_and_grad_buffer)\.py$")
"""Files in which a rank waits for others: torch's collectives, megatron-core's pipeline and gradient buffers."""


def grace_seconds(limit_seconds: float) -> float:
    """How long after its limit a rank is ended: time for other guardians to describe theirs."""
    return max(2.0, limit_seconds / 20)


class Watch:
    """One guardian's view of its rank.

    Args:
        heart: the page that it shares with the rank.
        pid: the rank's process.
    """

    def __init__(self, heart: Heartbeat, pid: int) -> None:
        self._heart, self._pid = heart, pid
        self._count, self._silent_seconds, self._looked = 0, 0.0, time.monotonic()
        self._described = False

    def look(self) -> bool:
        """Look once, and describe the rank where it hangs; whether it is to be ended now."""
        now = time.monotonic()
        ran, self._looked = min(now - self._looked, 2 * PERIOD_SECONDS), now
        count, _, _, limit = self._heart.read()
        if count != self._count:
            self._count, self._silent_seconds = count, 0.0
            self._take_back()
            return False
        self._silent_seconds += ran
        if count == 0 or self._silent_seconds < limit:
            return False
        if not self._described:
            self._described = True
            self._guarded(self._describe)
        ended = self._silent_seconds >= limit + grace_seconds(limit)
        if ended:
            self._guarded(self._wake)
            self._guarded(self._conclude)
        return ended

    @property
    def _attempt(self) -> Attempt:
        return Attempt.at(Path(self._heart.told()["attempt"]))

    def _describe(self) -> None:
        """Stacks into the rank's log, then its error file."""
        log = self._attempt.log(self._heart.told()["rank"])
        _note(log, f"the watch: {self._silence()}; its stacks and those of its children follow")
        stacks = "" if _is_stopped(self._pid) else _stacks(self._pid, log)
        for child in _children(self._pid):
            _note(log, f"the watch: process {child}, a child")
            _stacks(child, log)
        _native_stacks(self._pid, log)
        _trace(self._heart.told()["trace_pipe"])
        self._report(stacks)

    def _wake(self) -> None:
        """Let a stopped rank run for as long as it writes its stacks, and no earlier than it is ended.

        It goes on for that moment, and might release those that wait for it before they are described.
        """
        if _is_stopped(self._pid):
            log = self._attempt.log(self._heart.told()["rank"])
            _note(log, "the watch: it is stopped; its stacks follow, since it is ended now")
            self._report(_stacks(self._pid, log, wake=True), stopped=True)

    def _silence(self) -> str:
        _, phase, step, _ = self._heart.read()
        return f"no sign for {self._silent_seconds:.0f} s in {phase}{f' of step {step}' if step else ''}"

    def _report(self, stacks: str, *, stopped: bool = False) -> None:
        """Write the rank's error file."""
        told, attempt, state = self._heart.told(), self._attempt, "T" if stopped else _state(self._pid)
        frame = _innermost(stacks)
        waits = frame is not None and _WAITING.search(frame["file"]) is not None
        at = f", at {Path(frame['file']).name}:{frame['line']} in {frame['function']}" if frame else ""
        why = f" ({_STATES[state]})" if state in _STATES else ""
        Failure(
            rank=told["rank"],
            host=told["host"],
            exit_code=faults.FAULT,
            error_type=HANG,
            error=f"hangs: {self._silence()}{at}{why}; stacks in {attempt.log(told['rank'])}",
            traceback=None,
            time=time.time(),
            position=(int(state != "T"), self._count, int(waits)),
        ).write(attempt.errors)

    def _take_back(self) -> None:
        """It was slow, and goes on."""
        if self._described:
            self._described = False
            attempt, rank = self._attempt, self._heart.told()["rank"]
            faults.error_file(attempt.errors, rank).unlink(missing_ok=True)
            _note(attempt.log(rank), "the watch: it goes on")

    def _conclude(self) -> None:
        """Where no launcher of ours does it, rank 0's guardian says how the run ended: rank 0 cannot."""
        told, attempt = self._heart.told(), self._attempt
        if told["rank"] == 0 and told["launcher"] != "own":
            folder = RunFolder(attempt.path.parent.parent)
            failure = faults.culprit(faults.collect(attempt.errors, wait_seconds=0))
            log = EventLog(folder.events, attempt=attempt.number, rank=0)
            step = max(0, self._heart.read()[2] - 1)
            conclude(folder, attempt, failure.exit_code, failure, log, step, None)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what may fail (a full disk, say) without leaving the rank unguarded."""
        try:
            work()
        except Exception:
            with contextlib.suppress(Exception):
                _note(self._attempt.log(self._heart.told()["rank"]), f"the watch: {traceback.format_exc()}")


def _note(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(f"\n{text}\n")


def _state(pid: int) -> str:
    """The letter of a process's state; empty where it is gone. Source: proc_pid_stat(5)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _is_stopped(pid: int) -> bool:
    return _state(pid) == "T"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split() if int(word) != os.getpid()]
    return found


def _answers(pid: int) -> bool:
    """Whether a process has a handler for `STACKS`; to another one the signal would be its end."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS - 1) & 1)
    return False


def _stacks(pid: int, log: Path, *, wake: bool = False) -> str:
    """Have a process write the stacks of its threads into `log`, and return them; empty where it cannot.

    Args:
        pid: the process.
        log: where its standard error goes.
        wake: it is stopped; it runs for as long as it writes, and is stopped again.
    """
    if not _answers(pid):
        return ""
    start, deadline = log.stat().st_size, time.monotonic() + _PATIENCE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS)
        if wake:
            os.kill(pid, signal.SIGCONT)
        size = start
        while time.monotonic() < deadline and (size == start or log.stat().st_size != size):
            size = log.stat().st_size
            time.sleep(0.02)
        if wake:
            os.kill(pid, signal.SIGSTOP)
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _innermost(stacks: str) -> re.Match[str] | None:
    """The innermost Python frame of the main thread, which stands last: CPython lists the newest thread first."""
    return _FRAME.search(stacks, max(0, stacks.rfind("(most recent call first)")))


def _native_stacks(pid: int, log: Path) -> None:
    """The stacks once more with native frames, where py-spy is installed and may look."""
    program = shutil.which("py-spy")
    if program is None:
        return
    with log.open("ab") as file, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [program, "dump", "--native", "--pid", str(pid)]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=20, check=False)


def _trace(pipe: str | None) -> None:
    """Ask NCCL's flight recorder for its trace, through the pipe that torch reads in a thread of its own.

    Source: torch 2.11, ProcessGroupNCCL.hpp, DumpPipe.
    """
    if pipe is not None:
        with contextlib.suppress(OSError):  # no process group of NCCL was made yet
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, b"1")
            os.close(fd)
            time.sleep(_PATIENCE_SECONDS)
            os.unlink(pipe)
