"""Our own launcher: starts the ranks of one machine, watches them, and leaves nothing behind.

Each rank is a fresh interpreter (`python -P -m shardwright.pretrain.rank ATTEMPT`), leader of its own process group,
with torchrun's variables in its environment and its output in its own log file. The ranks meet at a store on a port
that the kernel chose: the launcher binds the listening socket and hands the descriptor to rank 0 (torch's
`TCPStore(master_listen_fd=...)`), so that no other process can take the port in between.

The first rank that fails decides: the others get two seconds to say what they saw, the one to blame is chosen
(`faults.culprit`), then all process groups are killed. SIGINT, SIGTERM or SIGUSR1 is passed on once; ranks then stop at
a step boundary, save and leave with 75. A second SIGINT kills.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from shardwright.pretrain import faults, guard, ranks
from shardwright.pretrain.faults import Failure
from shardwright.pretrain.folder import Attempt

RANK_COMMAND = (sys.executable, "-P", "-m", "shardwright.pretrain.rank")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the ranks of one attempt ended."""

    exit_code: int
    failure: Failure | None = None
    """The rank to blame, where one failed."""


@dataclass(slots=True)
class _Signals:
    """Signals that arrived; counted by handlers, read by the loop."""

    stops: int = 0
    interrupts: int = 0

    def handle(self, signum: int, frame: FrameType | None) -> None:
        self.stops += 1
        self.interrupts += signum == signal.SIGINT


@dataclass(slots=True)
class _Ranks:
    """The rank processes and what is known of their ends."""

    attempt: Attempt
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)

    def poll(self) -> bool:
        """Note who ended; whether any rank still runs."""
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and rank not in self.failures:
                failure = faults.judge(code, rank=rank, errors=self.attempt.errors, seen=time.time())
                if failure is not None:
                    self.failures[rank] = failure
        return any(process.returncode is None for process in self.processes)

    def ask_to_stop(self) -> None:
        """Pass a stop on to every rank, not to its children: a data-loader worker must go on until the save."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill every process group. SIGTERM asks for a save, and after a fault nothing may be saved."""
        for process in self.processes:
            guard.kill_group(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def launch(
    attempt: Attempt,
    *,
    world_size: int,
    added: Mapping[str, str],
    lock_fd: int,
    watch: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
    command: Sequence[str] = RANK_COMMAND,
) -> Outcome:
    """Run all ranks of an attempt on this machine, and return when every process of theirs is gone.

    Args:
        attempt: its folder gets logs and error files.
        world_size: ranks to start.
        added: variables for the ranks beside the rank's own, see `defaults`.
        lock_fd: descriptor of the run folder's lock, inherited by all ranks.
        watch: called about ten times a second while the ranks run.
        on_stop: called once, when a stop signal is passed on.
        command: the rank program; gets the attempt's folder as its argument.
    """
    before = guard.children()
    guard.adopt_orphans(True)
    members = _Ranks(attempt)
    with latched_signals() as signals:
        try:
            _start(members, world_size, added, lock_fd, command)
            return _supervise(members, signals, watch, on_stop)
        finally:
            members.end()
            _reap_orphans(before)
            guard.adopt_orphans(False)
            watch()


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that ranks on one machine should have and that the user did not set; a rank adds its own (`process`).

    Args:
        environ: environment of the launcher.
    """
    return {} if "GLOO_SOCKET_IFNAME" in environ else {"GLOO_SOCKET_IFNAME": "lo"}


def rank_environ(rank: int, world_size: int, *, port: int, launch_id: str, lock_fd: int) -> dict[str, str]:
    """Variables that make a process a rank of this launcher; `ranks.own` reads them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        ranks.LAUNCHER_PID: str(os.getpid()),
        ranks.LAUNCH_ID: launch_id,
        ranks.LOCK_FD: str(lock_fd),
    }


def _start(members: _Ranks, world_size: int, added: Mapping[str, str], lock_fd: int, command: Sequence[str]) -> None:
    """Start the ranks, stop signals blocked: a rank lets them in when it can answer them by saving."""
    attempt = members.attempt
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(max(128, world_size))
        port = listener.getsockname()[1]
        for rank in range(world_size):
            environ = os.environ | added
            environ |= rank_environ(rank, world_size, port=port, launch_id=attempt.id, lock_fd=lock_fd)
            fds = [lock_fd]
            if rank == 0:
                environ[ranks.STORE_FD] = str(listener.fileno())
                fds.append(listener.fileno())
            with attempt.log(rank).open("ab") as log, blocked(STOP_SIGNALS):
                members.processes.append(
                    subprocess.Popen(
                        [*command, str(attempt.path)],
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=fds,
                        process_group=0,
                    )
                )


def _supervise(members: _Ranks, signals: _Signals, watch: Callable[[], None], on_stop: Callable[[], None]) -> Outcome:
    """Wait for all ranks, for the first failure and what the others say about it, or for a second interrupt."""
    failed_at: float | None = None
    passed_on = False
    while members.poll():
        watch()
        if members.failures:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > faults.SPEAK_SECONDS:
                break
        if signals.stops and not passed_on:
            members.ask_to_stop()
            on_stop()
            passed_on = True
        if signals.interrupts > 1:
            break
        time.sleep(_POLL_SECONDS)
    if members.failures:
        written = {failure.rank: failure for failure in faults.collect(members.attempt.errors, wait_seconds=0)}
        failure = faults.culprit(list({**members.failures, **written}.values()))
        return Outcome(exit_code=failure.exit_code, failure=failure)
    codes = [process.returncode for process in members.processes]
    if None in codes:  # killed by the second interrupt
        return Outcome(exit_code=faults.UNFORESEEN)
    return Outcome(exit_code=max(codes, default=0))


def _reap_orphans(before: set[int]) -> None:
    """Wait for processes that outlived their rank (the guardians, for a moment); kill what does not go by itself."""
    deadline = time.monotonic() + 1.0
    while left := guard.children() - before:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


@contextlib.contextmanager
def latched_signals() -> Iterator[_Signals]:
    """Count stop signals instead of dying of them."""
    signals = _Signals()
    previous = {signum: signal.signal(signum, signals.handle) for signum in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def blocked(signums: Sequence[signal.Signals]) -> Iterator[None]:
    """Hold signals back; a process that is started meanwhile begins with them blocked."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
