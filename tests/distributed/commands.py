"""`shardwright train` as a user runs it: a process of its own, what it prints, and which processes are left of it.

A start costs ten seconds and more of imports, so tests share runs, and look at one run from many sides.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.pretrain.events import read_rows

from .harness import PR_SET_PDEATHSIG, prctl

LIMIT_SECONDS = 180.0
"""After this long a command hangs: it is killed and the test fails."""
GONE_SECONDS = 10.0
"""Within this time after its launcher's end no process of a run may be left."""

_MARK = "COMMAND_OF_A_TEST"
_PLANTED = Path(__file__).with_name("planted")
TRAIN = (sys.executable, "-P", "-m", "shardwright.pretrain", "train")
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2", *TRAIN[2:])

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.kv_channels=16",
    "model.vocab_size=500",
    "data.seq_length=64",
    "data.global_batch_size=4",
    "data.micro_batch_size=1",
    "schedule.lr_warmup_iters=2",
    "schedule.eval_iters=1",
    "telemetry.log_interval=1",
    "cluster.gpu=none",
)
"""A run of a few seconds on the CPU."""
ENDLESS = "schedule.train_iters=1000"
"""Steps for minutes: what is to be killed does not end by itself meanwhile."""
TWO_TENSOR_PARALLEL = ("parallel.tp=2", "parallel.sp=true", "cluster.ranks=2")
FINISHED_RUN = (
    *SMALL,
    *TWO_TENSOR_PARALLEL,
    "schedule.lr_decay_iters=12",
    "schedule.eval_interval=6",
    "checkpoint.save_interval=6",
)
"""What the fixture `finished_run` was started with, besides its 12 steps and the cache."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    """What it printed, standard error included."""


class Command:
    """A command that runs; all processes that descend from it carry a variable of their own in their environment.

    Args:
        command: program and arguments.
        output: file for what it prints.
        variables: environment variables beside those of this process.
    """

    def __init__(self, command: tuple[str, ...], output: Path, variables: Mapping[str, str]) -> None:
        self._mark = f"{_MARK}={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env={**os.environ, **variables, name: value},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Its end; killed where it takes longer."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {seconds:g} s:\n{self._output.read_text()}") from None
        return Ended(code, self._output.read_text())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition` holds, looked at every few milliseconds; the command must run until then."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.kill()
                raise AssertionError(f"ended, or took too long:\n{self._output.read_text()}")
            time.sleep(0.005)

    def kill(self) -> None:
        """End the command's first process by SIGKILL, and nothing else: the rest has to go by itself."""
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[int]:
        """Living processes that descend from this command, whoever their parent is now."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended meanwhile, or is somebody else's
                continue
        return found

    def left(self) -> list[int]:
        """Processes that are there `GONE_SECONDS` after the first one's end; killed then, to disturb no other test."""
        deadline = time.monotonic() + GONE_SECONDS
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


def _end_with_parent() -> None:
    """In the new process: tests that are killed leave no run behind."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(
    run_dir: Path,
    *overrides: str,
    command: tuple[str, ...] = TRAIN,
    fault: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Command:
    """Start `shardwright train run.dir=RUN_DIR ...`.

    Args:
        run_dir: the run's folder; what is printed goes into files beside it.
        *overrides: further overrides.
        command: program and arguments before the overrides.
        fault: what goes wrong, as `planted/sitecustomize.py` reads it.
        variables: environment variables to set.
    """
    added = dict(variables or {})
    if fault is not None:
        added["PLANTED_FAULT"] = fault
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PLANTED), os.environ.get("PYTHONPATH")]))
    output = run_dir.with_name(f"{run_dir.name}.{time.time_ns()}.out")
    return Command((*command, *overrides, f"run.dir={run_dir}"), output, added)


def train(run_dir: Path, *overrides: str, **options: Any) -> Ended:
    """Like `start`, to its end."""
    return start(run_dir, *overrides, **options).wait()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return read_rows(run_dir / "metrics.jsonl")


def steps(run_dir: Path) -> list[int]:
    """The steps of metrics.jsonl, in the order of the file."""
    return [row["step"] for row in rows(run_dir)]


def trajectory(run_dir: Path) -> list[tuple[Any, ...]]:
    """What must not depend on how often a run was interrupted; floats in JSON round-trip exactly."""
    names = ("step", "loss", "grad_norm", "lr", "weight_decay", "batch_size", "consumed_samples")
    return [tuple(row[name] for name in names) for row in rows(run_dir)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [row for row in read_rows(run_dir / "events.jsonl") if row["kind"] == kind]


def checkpoints(run_dir: Path) -> list[str]:
    """Names in the checkpoints folder, hidden ones too."""
    folder = run_dir / "checkpoints"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
