"""No rank and no child of a rank outlives the process that started it.

Two nets, both made by the rank itself at its very start, before torch and before any thread:

* the kernel kills the rank when its launcher dies (`PR_SET_PDEATHSIG`). That covers the rank alone, not its children
  (data-loader workers, the processes that write checkpoints).
* a guardian, a tiny process in a session of its own, watches the rank and the launcher. When either is gone, or the
  rank hangs (`watch`), it sends SIGKILL to the rank's whole process group. It works under every launcher: torchrun's
  workers live on when their agent is killed (torch 2.11 starts them in sessions of their own).

The guardian keeps the run folder's lock until it has done its work, so the lock is free only when the last one is gone.
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from shardwright.pretrain.heartbeat import Heartbeat
from shardwright.pretrain.watch import PERIOD_SECONDS, Watch

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


def protect(launcher: int, *, keep: int | None = None) -> Heartbeat:
    """Tie this process and its children to the life of `launcher`; call first, with one thread and without children.

    Args:
        launcher: process id of the parent: our own launcher, torchrun's agent or Slurm's step daemon.
        keep: file descriptor that the guardian holds on to (the lock).

    Returns:
        What the guardian watches once it has begun to beat.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
    rank, heart = os.getpid(), Heartbeat()
    if os.fork() == 0:
        try:
            _guard(rank, launcher, keep, heart)
        finally:
            os._exit(0)
    return heart


def die_with_parent(signum: signal.Signals) -> None:
    """Let the kernel send `signum` to this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans(adopt: bool) -> None:
    """Let the kernel hand orphaned grandchildren to this process (or not any more), so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def children(process: int | None = None) -> set[int]:
    """Process ids of a process's children, adopted ones included; of this one's if None."""
    found: set[int] = set()
    for thread in Path(f"/proc/{process or 'self'}/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(int(pid) for pid in (thread / "children").read_text().split())
    return found


def kill_group(leader: int, signum: signal.Signals) -> None:
    """Send a signal to the process group of `leader`, which may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def _guard(rank: int, launcher: int, keep: int | None, heart: Heartbeat) -> None:
    """The guardian's whole life."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    _prctl(_PR_SET_NAME, ctypes.c_char_p(b"rank-guardian"))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    watch = Watch(heart, rank)
    one_is_gone = _ends_of(rank, launcher)
    while not one_is_gone(PERIOD_SECONDS) and not watch.look():
        pass
    kill_group(rank, signal.SIGKILL)


def _ends_of(*pids: int) -> Callable[[float], bool]:
    """A function that waits for so many seconds or until one of the processes goes, and says whether one is gone."""
    try:
        fds = [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        return lambda seconds: True
    except OSError:  # a kernel older than 5.3

        def look(seconds: float) -> bool:
            time.sleep(seconds)
            return not all(_alive(pid) for pid in pids)

        return look
    return lambda seconds: bool(select.select(fds, [], [], seconds)[0])


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _prctl(option: int, value: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
