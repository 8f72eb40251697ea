"""Run one function in several ranks: forked per case from a process that has already imported torch and megatron.

Importing takes 10 s and more, a fork with its process group under a second; and since every case has fresh processes,
no state of megatron-core has to be taken back. (A living pool of ranks that re-initialises the process groups is
slower, and leaks threads and files each time.) Ranks meet through a file store, so no port can be taken twice.

A rank hands its outcome over in a file, and its end is seen through a pidfd: a rank that dies without a word is told
from one that still works. Whatever a case leaves behind, also processes that ranks started, is killed at its end.
"""

import ctypes
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RunRanks = Callable[..., list[Any]]

GRACE_SECONDS = 5.0
"""How long the other ranks may go on after the first failure: they wait for the failed one, or fail by themselves."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class RankError(Exception):
    """A rank failed: which one, and its traceback or the way it ended."""

    def __init__(self, rank: int, text: str, others: dict[int, str]) -> None:
        self.rank = rank
        self.text = text
        also = "".join(f"\nthen rank {other}: {last_line(words)}" for other, words in others.items())
        super().__init__(f"rank {rank}: {text.rstrip()}{also}")


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 90) -> list[Any]:
    """Call `function(rank, num_ranks, store_path, *args)` in `num_ranks` forked processes.

    Args:
        function: what every rank does; its result must be picklable. It makes the process group it needs itself, from
            `init_method=f"file://{store_path}"`.
        num_ranks: processes of the case; the environment of each has RANK, LOCAL_RANK and WORLD_SIZE.
        *args: handed on to every rank; they are forked with it, so anything goes.
        timeout_seconds: when ranks that still run are killed and the case fails.

    Returns:
        The results in rank order.

    Raises:
        RankError: a rank raised, ended without a result, or was not done in time; the first one to fail is named.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a dead rank had started becomes our child, so it can be found
    before = set(children())
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        try:
            pids = [fork_rank(function, rank, num_ranks, Path(folder), args) for rank in range(num_ranks)]
            failures = wait_for_ranks(pids, Path(folder), timeout_seconds)
        finally:
            kill_children_except(before)
        if failures:
            rank, text = next(iter(failures.items()))
            raise RankError(rank, text, {other: failures[other] for other in failures if other != rank})
        return [pickle.loads(outcome_path(Path(folder), rank).read_bytes())[1] for rank in range(num_ranks)]


def fork_rank(function: Callable[..., Any], rank: int, num_ranks: int, folder: Path, args: tuple[Any, ...]) -> int:
    """Fork one rank; returns its pid in the parent, and never returns in the rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # before any other thread: rebuilds the pool that the fork broke
        outcome: tuple[bool, Any] = (True, function(rank, num_ranks, str(folder / "store"), *args))
        payload = pickle.dumps(outcome)
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    try:
        written = folder / f"writing_{rank}"
        written.write_bytes(payload)
        written.rename(outcome_path(folder, rank))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def wait_for_ranks(pids: list[int], folder: Path, timeout_seconds: float) -> dict[int, str]:
    """Wait until every rank has ended, time is up, or the grace after a first failure is over.

    Returns:
        What is wrong with which rank, first failure first; ranks that had to be stopped come last.
    """
    deadline = time.monotonic() + timeout_seconds
    failures: dict[int, str] = {}
    running = {os.pidfd_open(pid): (rank, pid) for rank, pid in enumerate(pids)}
    try:
        while running and (remaining := deadline - time.monotonic()) > 0:
            for descriptor in select.select(list(running), [], [], remaining)[0]:
                rank, pid = running.pop(descriptor)
                os.close(descriptor)
                if text := failure_of(rank, pid, folder):
                    failures[rank] = text
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        reason = "stopped, since another rank had failed" if failures else f"not done after {timeout_seconds:g} s"
        failures.update({rank: reason for rank, _ in running.values()})
    finally:
        for descriptor in running:
            os.close(descriptor)
    return failures


def failure_of(rank: int, pid: int, folder: Path) -> str:
    """Reap rank `rank`, which has ended; returns what was wrong with it, empty if nothing."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not outcome_path(folder, rank).exists():
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no result"
    good, result = pickle.loads(outcome_path(folder, rank).read_bytes())
    return "" if good else str(result)


def outcome_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves (True, result) or (False, traceback)."""
    return folder / f"outcome_{rank}"


def kill_children_except(kept: set[int]) -> None:
    """Kill and reap every child of this process but `kept`, again while the dead hand over children of their own."""
    while left := set(children()) - kept:
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # not yet reaped, so it is still this process's child
        for pid in left:
            os.waitpid(pid, 0)


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def last_line(text: str) -> str:
    """Return the line of a traceback that names the error."""
    return text.rstrip().rsplit("\n", 1)[-1]


def prctl(option: int, value: int) -> None:
    """Set one property of this process (man 2 prctl)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
