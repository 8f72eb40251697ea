"""`shardwright train`: from overrides to an exit code.

Started from a shell, this process becomes the launcher of all ranks, on this machine. Started by torchrun or srun it
becomes one rank: rank 0 begins the attempt, the others wait for its file. Either way `start` decides what is to be
done, the run folder's lock is taken, the ranks train (`rank.work`), and status.json says how it ended.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, TextIO

from shardwright.conf import compose
from shardwright.conf.compose import Difference
from shardwright.conf.keys import ResumePolicy
from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import faults, guard, plan, plan_table, rank, ranks, summary, terminal
from shardwright.pretrain.conclusion import STATES, conclude
from shardwright.pretrain.display import Display
from shardwright.pretrain.events import EventLog, Story
from shardwright.pretrain.folder import Attempt, Lock, RunFolder
from shardwright.pretrain.heartbeat import Heartbeat
from shardwright.pretrain.launch import defaults, launch
from shardwright.pretrain.ranks import RankEnvironment
from shardwright.pretrain.start import Start, begin, resolve

_ATTEMPT_WAIT_SECONDS = 120
"""How long a rank waits for rank 0 to begin the attempt; it covers the wait for the lock and a slow shared disk."""
_STATUS_WAIT_SECONDS = 10


def train(overrides: Sequence[str], *, dry_run: bool = False) -> int:
    """Train, or go on training, the run that the overrides describe.

    Args:
        overrides: Hydra overrides.
        dry_run: only say what would be done.

    Returns:
        The exit code; a rank of torchrun or srun ends its process and does not return.

    Raises:
        RefusedError: before the first rank, and before anything is written.
    """
    environment = ranks.detect(os.environ)
    heart = None
    if environment is not None and not dry_run:
        heart = guard.protect(os.getppid())
    start = resolve(overrides, environment)
    if start.finished or dry_run:
        if environment is None or environment.rank == 0:
            _explain(start, environment)
        return 0
    if environment is None or heart is None:
        return _launch_here(start, overrides)
    if environment.rank == 0:
        _lead(start, environment, overrides, heart)
    _follow(start.folder, environment, heart)


def _launch_here(start: Start, overrides: Sequence[str]) -> int:
    """Be the launcher: start the ranks, show their rows as they come, and write down how it ended."""
    start.folder.create()
    with start.folder.lock() as lock:
        if lock.waited:  # the other writer has changed what was read before
            start = resolve(overrides, None)
            if start.finished:
                _explain(start, None)
                return 0
        display = _display(start)
        try:
            return _run_ranks(start, begin(start, overrides, {"launcher": "own"}), lock, display)
        finally:
            display.close()


def _run_ranks(start: Start, attempt: Attempt, lock: Lock, display: Display) -> int:
    folder, world_size, began = start.folder, start.config.world_size, time.monotonic()
    story = Story(folder.events, folder.metrics, attempt=attempt.number)
    log = EventLog(folder.events, attempt=attempt.number, rank=None)

    def watch() -> None:
        for row in story.poll():
            (display.event if "kind" in row else display.metrics)(row)
        display.tick()

    added = defaults(os.environ)
    if added:
        settings = ", ".join(f"{name}={value}" for name, value in added.items())
        display.note(f"environment of the ranks: {settings} (was not set)")
    log.write("phase", phase=f"starting {world_size} rank{'s' * (world_size > 1)}")
    outcome = launch(
        attempt,
        world_size=world_size,
        added=added,
        lock_fd=lock.fd,
        watch=watch,
        on_stop=lambda: log.write("stop_requested", display.step),
    )
    seconds = time.monotonic() - began
    conclude(folder, attempt, outcome.exit_code, outcome.failure, log, display.step, seconds)
    watch()
    return outcome.exit_code


def _lead(start: Start, environment: RankEnvironment, overrides: Sequence[str], heart: Heartbeat) -> NoReturn:
    """Be rank 0 under torchrun or srun: begin the attempt, train, and write down how it ended."""
    start.folder.create()
    with start.folder.lock() as lock:
        if lock.waited:
            start = resolve(overrides, environment)
        environment = ranks.listen(environment)
        details = {
            "launcher": environment.launcher,
            "launch_id": environment.launch_id,
            "master_port": environment.master_port,
        }
        attempt, began = begin(start, overrides, details), time.monotonic()
        display = _display(start, _log_into(attempt, environment.rank))
        exit_code = rank.work(environment, attempt, heart, display=display)
        failures = faults.collect(attempt.errors) if exit_code not in STATES else []
        failure = faults.culprit(failures) if failures else None
        exit_code = failure.exit_code if failure else exit_code
        log = EventLog(start.folder.events, attempt=attempt.number, rank=0, listener=display.event)
        conclude(start.folder, attempt, exit_code, failure, log, display.step, time.monotonic() - began)
        rank.leave(_told(exit_code))


def _follow(folder: RunFolder, environment: RankEnvironment, heart: Heartbeat) -> NoReturn:
    """Be another rank under torchrun or srun: wait for rank 0's attempt and train."""
    deadline = time.monotonic() + _ATTEMPT_WAIT_SECONDS
    while (attempt := folder.running_attempt(environment.launch_id)) is None:
        if time.monotonic() > deadline:
            rule = f"rank 0 began no attempt there within {_ATTEMPT_WAIT_SECONDS} s ({environment.launch_id})"
            remedy = "see what rank 0 says; all machines must see the same folder"
            raise RefusedError([Problem(key="run.dir", value=folder.path, rule=rule, remedy=remedy)])
        time.sleep(0.2)
    former = _log_into(attempt, environment.rank)
    environment = dataclasses.replace(environment, master_port=attempt.launch["master_port"])
    exit_code = rank.work(environment, attempt, heart)
    failure = faults.read(attempt.errors, environment.rank)
    if failure is not None:
        print(f"rank {failure.rank} on {failure.host} failed: {failure.error}", file=former, flush=True)
        if not failure.communication and folder.is_held_by(attempt):  # rank 0 may be killed before it can say so
            folder.write_status("failed", attempt, exit_code=exit_code, step=None, error=failure.as_event())
    if exit_code in STATES:
        _wait_for_rank_0(folder, attempt)
    rank.leave(_told(exit_code))


def _told(exit_code: int) -> int:
    """What a rank's launcher is told: an agent inside of a job would start ranks again that were stopped."""
    return 0 if exit_code == faults.STOPPED and ranks.NODE in os.environ else exit_code


def _wait_for_rank_0(folder: RunFolder, attempt: Attempt) -> None:
    """Let rank 0 write down how it ended: to srun's --kill-on-bad-exit, 75 is a bad exit, and it kills all others."""
    deadline = time.monotonic() + _STATUS_WAIT_SECONDS
    while time.monotonic() < deadline:
        status = folder.status()
        if status.get("attempt_id") == attempt.id and status.get("state") != "running":
            return
        time.sleep(0.1)


def _log_into(attempt: Attempt, rank_number: int) -> TextIO:
    """Turn standard output and error into the rank's log; returns the former standard output."""
    former = os.fdopen(os.dup(1), "w")
    with attempt.log(rank_number).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    return former


def _display(start: Start, output: TextIO | None = None) -> Display:
    """A display that has shown in which keys this start differs from the frozen configuration.

    Args:
        start: what is about to be done.
        output: where plain lines go; None for standard output, as a person's terminal where it is one.
    """
    display = Display(
        terminal.console(file=output),
        interactive=output is None and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb",
        log_interval=start.config.telemetry.log_interval,
        changes={difference.key: compose.shown(difference.present) for difference in start.differences},
    )
    if start.differences:
        display.table(f"changed against {start.folder.config}", _changes(start.differences), "yellow")
    if start.since_checkpoint:
        assert start.load is not None
        display.table(f"changed since {start.load.path} was written", _changes(start.since_checkpoint), "yellow")
    return display


def _changes(differences: Sequence[Difference]) -> summary.Facts:
    return [
        (
            difference.key,
            f"{compose.shown(difference.saved)} -> {compose.shown(difference.present)}"
            f"{' (results change)' * (difference.policy is ResumePolicy.warn)}",
        )
        for difference in differences
    ]


def _explain(start: Start, environment: RankEnvironment | None) -> None:
    """Say what would be done, or that nothing is left to do."""
    display = _display(start)
    folder, config = start.folder, start.config
    if start.finished:
        assert start.load is not None
        step = start.load.step
        longer = summary.continue_command(folder.path, {"schedule.train_iters": 2 * step})
        facts = [("run folder", str(folder.path)), ("steps", f"{step} of {config.schedule.train_iters}")]
        display.table("nothing left to do: this run is finished", [*facts, ("train longer", longer)], "green")
        return
    plan_table.show(plan.make_plan(config), terminal.console())
    by = "started here" if environment is None else f"started by {environment.launcher}"
    facts = [
        ("run", f"{config.run.name} in {folder.path} ({'goes on' if folder.config.exists() else 'new'})"),
        ("ranks", f"{config.world_size} on {start.device}, {by}"),
        ("starts from", str(start.load.path) if start.load else "step 0"),
        ("trains to", f"step {config.schedule.train_iters}"),
    ]
    display.table("a dry run: nothing was written or started", facts, "cyan")
