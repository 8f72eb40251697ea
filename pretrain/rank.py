"""The life of one rank process around the training itself, from the guard to the exit code.

`main` is the program that our own launcher starts; under torchrun and srun `train` becomes the rank itself and calls
`work`. Either way: guard first, then the log, then the attempt's configuration, and only then torch, through
`shardwright.pretrain.run.run_rank(context) -> exit code`. An exception becomes the rank's error file and its exit code.
The process leaves by `os._exit`: no collective, no destructor and no thread can hold it back.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from shardwright.conf.schema import Config
from shardwright.pretrain import faults, guard, heartbeat, process, ranks, watch
from shardwright.pretrain.deadline import Deadline
from shardwright.pretrain.events import EventLog
from shardwright.pretrain.folder import Attempt, Fence, RunFolder
from shardwright.pretrain.heartbeat import Heartbeat
from shardwright.pretrain.launch import STOP_SIGNALS
from shardwright.pretrain.metrics import MetricsLog
from shardwright.pretrain.ranks import RankEnvironment

if TYPE_CHECKING:
    from shardwright.pretrain.display import Display


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """All that a rank is given to train with."""

    config: Config
    folder: RunFolder
    attempt: Attempt
    environment: RankEnvironment
    device: str
    """cuda or cpu."""
    load: tuple[Path, ...]
    """Checkpoint to continue from, and behind it what to take if its content is damaged; empty starts at step 0."""
    damaged: tuple[dict[str, str], ...]
    """Path and reason of newer checkpoints that the launcher found not to be whole."""
    events: EventLog
    metrics: MetricsLog | None
    """Rank 0 alone has one."""
    stop_requested: Callable[[], bool]
    """Whether this rank was asked to save and stop; the ranks must agree on a step before they act on it."""
    deadline: Deadline
    """When the run has to leave by itself; the same holds."""
    fence: Fence
    """Rank 0 asks it before it writes."""
    heart: Heartbeat
    """Tells the guardian what this rank does."""

    def phase(self, name: str) -> None:
        """Tell what is being done before the first step: each rank its guardian, and rank 0 for all whoever looks."""
        self.heart.beat(name)
        if self.environment.rank == 0:
            self.events.write("phase", phase=name)


class StopLatch:
    """Remembers that a stop signal came; nothing else happens inside the handler.

    Children that this process forks inherit the handler and go on too: Slurm sends SIGTERM to every process of a step,
    and without the children that write it there is no checkpoint. They end with their rank, by the guardian.
    """

    def __init__(self) -> None:
        self._requested = False

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._requested

    def install(self) -> None:
        """Take the stop signals, which the launcher may have left blocked until now."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True


def main(engine: Callable[[RankContext], int] | None = None) -> NoReturn:
    """A rank of our own launcher: `python -m shardwright.pretrain.rank ATTEMPT`.

    Args:
        engine: what trains; None for `run.run_rank`.
    """
    lock_fd = int(os.environ[ranks.LOCK_FD])
    os.set_inheritable(lock_fd, False)
    heart = guard.protect(int(os.environ[ranks.LAUNCHER_PID]), keep=lock_fd)
    leave(work(ranks.own(os.environ), Attempt.at(Path(sys.argv[1])), heart, engine=engine))


def work(
    environment: RankEnvironment,
    attempt: Attempt,
    heart: Heartbeat,
    *,
    engine: Callable[[RankContext], int] | None = None,
    display: "Display | None" = None,
) -> int:
    """Train as one rank; the guard stands and standard output is the rank's log.

    Args:
        environment: who this rank is.
        attempt: the attempt that all ranks share.
        heart: this rank's, whose guardian begins to watch now.
        engine: what trains; None for `run.run_rank`.
        display: shown the rows of this rank, where no launcher of ours follows the files.

    Returns:
        The exit code; an exception is written to the error file and is not raised.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(watch.STACKS, chain=False)
    stop = StopLatch()
    stop.install()
    try:
        context = _context(environment, attempt, heart, stop, display)
        traces = process.Traces.of(attempt) if context.device == "cuda" else None
        heart.begin(
            heartbeat.limits(context.config.resilience),
            attempt=str(attempt.path),
            rank=environment.rank,
            host=environment.host,
            launcher=environment.launcher,
            trace_pipe=traces.pipe(environment.rank) if traces else None,
        )
        process.prepare(context.config, context.device, environment.local_rank, traces)
        return (engine or _torch_engine())(context)
    except BaseException as error:
        traceback.print_exc()
        failure = faults.Failure.of(error, rank=environment.rank, host=environment.host)
        failure.write(attempt.errors)
        return failure.exit_code


def leave(exit_code: int) -> NoReturn:
    """End this process now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _torch_engine() -> Callable[[RankContext], int]:
    from shardwright.pretrain.run import run_rank

    return run_rank


def _context(
    environment: RankEnvironment, attempt: Attempt, heart: Heartbeat, stop: StopLatch, display: "Display | None"
) -> RankContext:
    from shardwright.conf import compose  # imports YAML: after the guard

    folder = RunFolder(attempt.path.parent.parent)
    number, told = attempt.number, attempt.launch
    on_event, on_metrics = (display.event, display.metrics) if display else (None, None)
    metrics = MetricsLog(folder.metrics, attempt=number, listener=on_metrics) if environment.rank == 0 else None
    config = compose.load(attempt.config)
    return RankContext(
        config=config,
        folder=folder,
        attempt=attempt,
        environment=environment,
        device=told["device"],
        load=tuple(map(Path, told["load"])),
        damaged=tuple(told.get("damaged", ())),
        events=EventLog(folder.events, attempt=number, rank=environment.rank, listener=on_event),
        metrics=metrics,
        stop_requested=stop,
        deadline=Deadline.of(os.environ, config.resilience.exit_before),
        fence=Fence(folder, attempt),
        heart=heart,
    )


if __name__ == "__main__":
    main()
