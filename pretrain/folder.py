"""A run's folder: one folder is one run, with one writer at a time and one numbered attempt per start.

    config.yaml  overrides.txt      the resolved configuration and what was typed; written once, never changed
    attempts/001/                   config.yaml of that attempt, launch.json, provenance.json, logs/, errors/,
                                    removed_metrics.jsonl (rows of steps that were done again)
    metrics.jsonl  events.jsonl     a row per step, a row per event
    fp8.jsonl                       a row per sampled step, linear layer and operand, with a narrow format
    status.json                     how it stands; exit codes are masked by torchrun and Slurm, this file is not
    checkpoints/
    lock  lock.json                 the writer's lock, and who holds it

The lock is `flock` on a file descriptor that every rank inherits, so that it is free only when the last rank is gone,
however its launcher ended.

Across machines flock may hold or not, as the file system likes, so there is a fence too: the holder says every few
seconds in lock.json that it lives. Who finds a holder of another machine that has not concluded watches it for a while
before taking over, and a holder that finds another one's name there writes nothing more and leaves (`Fence`).
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import metrics, nodelist
from shardwright.pretrain.events import drop_torn_line, now

_OWN = re.compile(r"\.?(config\.yaml|overrides\.txt|lock\.json)(\.\d+)?|attempts|lock")
"""What a start that was killed before its configuration was frozen may leave behind."""
BEAT_SECONDS = 5.0
"""So often the holder of a folder says that it lives."""
SILENT_SECONDS = 15.0
"""A holder on another machine that was silent for so long is dead."""


class SupersededError(RuntimeError):
    """Another process has taken over the run's folder: this one was taken for dead."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of a run; its id is shared by all ranks."""

    number: int
    id: str
    path: Path

    @property
    def config(self) -> Path:
        """The configuration that this attempt runs with."""
        return self.path / "config.yaml"

    @property
    def errors(self) -> Path:
        """Folder of the ranks' error files."""
        return self.path / "errors"

    @property
    def launch(self) -> dict[str, Any]:
        """What the ranks are told besides the configuration: device, load, damaged, launch_id, master_port."""
        content: dict[str, Any] = json.loads((self.path / "launch.json").read_text())
        return content

    def log(self, rank: int) -> Path:
        """Where standard output and error of a rank go."""
        return self.path / "logs" / f"rank_{rank:05d}.log"

    @classmethod
    def at(cls, path: Path) -> "Attempt":
        """The attempt of a folder that `new_attempt` made."""
        return cls(number=int(path.name), id=json.loads((path / "launch.json").read_text())["id"], path=path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """The held lock of a run's folder."""

    fd: int
    waited: bool
    """Whether another writer had it at first, so that whatever was read before is out of date."""


class Fence:
    """Keeps an attempt that was taken for dead from writing; rank 0 asks before it writes.

    Args:
        folder: the run.
        attempt: the attempt that this process is of.
    """

    def __init__(self, folder: "RunFolder", attempt: Attempt) -> None:
        self._folder, self._attempt, self._looked = folder, attempt, -math.inf

    def check(self, *, now: bool = False) -> None:
        """Look into lock.json, at most once per `BEAT_SECONDS` unless `now`.

        Raises:
            SupersededError: the folder has another holder.
        """
        if not now and time.monotonic() - self._looked < BEAT_SECONDS:
            return
        self._looked = time.monotonic()
        if not self._folder.is_held_by(self._attempt):
            raise SupersededError(f"another process has taken over {self._folder.path}: {self._folder.holder()}")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The frozen configuration."""
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        """What was typed at the first start, an override a line."""
        return self.path / "overrides.txt"

    @property
    def attempts(self) -> Path:
        """Folder of the attempts."""
        return self.path / "attempts"

    @property
    def fp8(self) -> Path:
        """A row for each operand that was sampled."""
        return self.path / "fp8.jsonl"

    @property
    def metrics(self) -> Path:
        """A row per step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """A row per event."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def excluded_nodes(self) -> Path:
        """Under Slurm: nodes that failed, separated by commas."""
        return self.path / "excluded_nodes"

    @property
    def lock_info(self) -> Path:
        """Who holds, or held last, the lock."""
        return self.path / "lock.json"

    def create(self) -> None:
        """Make the folder, readable by its owner alone.

        Raises:
            RefusedError: it cannot be made, or something else lives there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            foreign = sorted(name for name in os.listdir(self.path) if not _OWN.fullmatch(name))
            if foreign and not self.config.exists():
                rule = f"exists and is not a run's folder (it holds {', '.join(foreign[:3])})"
                raise RefusedError([self._problem(rule, "choose another run.dir")])
            self.path.chmod(0o700)
            self.attempts.mkdir(exist_ok=True)
        except OSError as error:
            raise RefusedError([self._problem(f"cannot be used: {error.strerror}", "choose another run.dir")]) from None

    @contextlib.contextmanager
    def lock(self, wait_seconds: float = 15) -> Iterator[Lock]:
        """Hold the folder for one writer.

        The descriptor is closed at the end and not unlocked: ranks that inherited it and still live keep the lock.

        Raises:
            RefusedError: another writer, named, held it for all of `wait_seconds`.
        """
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline, waited = time.monotonic() + wait_seconds, False
            while not self._try_lock(fd):
                waited = True
                if time.monotonic() >= deadline:
                    rule = f"another process trains there: {self.holder()}"
                    raise RefusedError([self._problem(rule, "wait for it, end it, or choose another run.dir")])
                time.sleep(0.1)
            waited |= self._outwait_another_machine()
            self._hold(None)
            stop = threading.Event()
            threading.Thread(target=self._beat, args=(stop,), name="run-folder-beat", daemon=True).start()
            try:
                yield Lock(fd=fd, waited=waited)
            finally:
                stop.set()
        finally:
            os.close(fd)

    def excluded(self, configured: str | None) -> str | None:
        """Nodes that are not to be used, in Slurm's form: those of `cluster.exclude`, and those that failed before."""
        names = [configured or ""]
        if self.excluded_nodes.exists():
            given = nodelist.expand(configured, variable="cluster.exclude") if configured else []
            names += [name for name in self.excluded_nodes.read_text().strip().split(",") if name not in given]
        return ",".join(filter(None, names)) or None

    def exclude(self, nodes: Sequence[str]) -> None:
        """Write down nodes that failed; the file is the user's to change, too."""
        known = self.excluded_nodes.read_text().strip().split(",") if self.excluded_nodes.exists() else []
        write_atomic(self.excluded_nodes, ",".join(dict.fromkeys([*filter(None, known), *nodes])) + "\n")

    def is_held_by(self, attempt: Attempt) -> bool:
        """Whether this attempt may write; where nobody can be read, it may."""
        return bool(self._holder().get("attempt_id", attempt.id) == attempt.id)

    def holder(self) -> str:
        """Who holds the lock, in words."""
        try:
            info = self._holder()
            return (
                f"pid {info['pid']} on {info['host']} since {info['time']}, attempt {info['attempt'] or '(starting)'}"
            )
        except KeyError:
            return "(unknown)"

    def freeze(self, config: str, overrides: Sequence[str]) -> None:
        """Write the run's configuration for good, the overrides first, so that config.yaml alone means a whole pair."""
        write_atomic(self.overrides, "".join(f"{override}\n" for override in overrides))
        write_atomic(self.config, config)

    def saved_overrides(self) -> list[str]:
        """What was typed at the first start."""
        return self.overrides.read_text().splitlines() if self.overrides.exists() else []

    def new_attempt(self, config: str, launch: Mapping[str, Any]) -> Attempt:
        """Number and write the next attempt, repair what a killed one left; the lock must be held.

        Args:
            config: its configuration as YAML.
            launch: what its ranks are told, see `Attempt.launch`; without a `launch_id` the attempt's id is taken.
        """
        numbers = [int(path.name) for path in self.attempts.iterdir() if path.name.isdigit()]
        number = max(numbers, default=0) + 1
        attempt = Attempt(
            number=number, id=f"{number:03d}-{secrets.token_hex(4)}", path=self.attempts / f"{number:03d}"
        )
        try:
            attempt.path.mkdir()
        except FileExistsError:  # two holders at once: this line is where one of them loses
            rule = f"another process has begun attempt {number} there at this moment: {self.holder()}"
            raise RefusedError([self._problem(rule, "wait for it, end it, or choose another run.dir")]) from None
        for folder in (attempt.path / "logs", attempt.errors):
            folder.mkdir()
        drop_torn_line(self.events)
        write_atomic(attempt.config, config)
        self._hold(attempt)
        content = {"id": attempt.id, "launch_id": attempt.id, "time": now(), **launch}
        write_atomic(attempt.path / "launch.json", json.dumps(content, indent=1) + "\n")
        return attempt

    def running_attempt(self, launch_id: str) -> Attempt | None:
        """The attempt that rank 0 of this launch has begun, or None as long as it has not.

        An attempt of an earlier launch with the same id (torchrun's default is the same always) does not hold the lock.
        """
        try:
            info = json.loads(self.lock_info.read_text())
            path = self.attempts / f"{info['attempt']:03d}"
            if json.loads((path / "launch.json").read_text())["launch_id"] != launch_id or not self._is_locked():
                return None
            return Attempt.at(path)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def cut_metrics(self, step: int, attempt: Attempt) -> int:
        """Keep the metrics up to `step`, move later rows into the attempt; rank 0, before its first row."""
        fp8 = ("step", "layer", "operand")
        metrics.cut(self.fp8, step, removed=attempt.path / "removed_fp8.jsonl", identity=fp8)
        return metrics.cut(self.metrics, step, removed=attempt.path / "removed_metrics.jsonl")

    def status(self) -> dict[str, Any]:
        """The last status; empty for a run that has not begun."""
        try:
            content: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return content

    def write_status(self, state: str, attempt: Attempt, **details: Any) -> None:
        """Replace status.json.

        Args:
            state: running, done, stopped (saved, can go on) or failed.
            attempt: the attempt that it is about.
            details: exit_code, step, error and the like.
        """
        content = {"state": state, "time": now(), "attempt": attempt.number, "attempt_id": attempt.id, **details}
        write_atomic(self.path / "status.json", json.dumps(content, indent=1) + "\n")

    def _hold(self, attempt: Attempt | None) -> None:
        number, id_ = (attempt.number, attempt.id) if attempt else (None, secrets.token_hex(4))
        info = {"host": _host(), "pid": os.getpid(), "time": now(), "attempt": number, "attempt_id": id_, "beat": 0}
        write_atomic(self.lock_info, json.dumps(info, indent=1) + "\n")

    def _holder(self) -> dict[str, Any]:
        """Content of lock.json; empty where it cannot be read."""
        try:
            info = json.loads(self.lock_info.read_text())
        except (OSError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    def _beat(self, stop: threading.Event) -> None:
        """The holder's thread: count on in lock.json, and never again once somebody else stands there."""
        while not stop.wait(BEAT_SECONDS):
            info = self._holder()
            if (info.get("host"), info.get("pid")) != (_host(), os.getpid()):
                return
            with contextlib.suppress(OSError):
                write_atomic(self.lock_info, json.dumps({**info, "beat": info["beat"] + 1}, indent=1) + "\n")

    def _outwait_another_machine(self) -> bool:
        """Watch a holder of another machine that has not concluded, whose flock may not be seen here.

        Returns:
            Whether there was one; it is dead then.

        Raises:
            RefusedError: it lives.
        """
        found, status = self._holder(), self.status()
        concluded = status.get("attempt_id") == found.get("attempt_id") and status.get("state") != "running"
        if not found or concluded or found.get("host") == _host():
            return False
        deadline = time.monotonic() + SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(0.5, SILENT_SECONDS / 10))
            if self._holder() != found:
                rule = f"another process trains there: {self.holder()}"
                raise RefusedError([self._problem(rule, "wait for it, end it, or choose another run.dir")])
        return True

    def _try_lock(self, fd: int, kind: int = fcntl.LOCK_EX) -> bool:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            rule = f"its file system cannot lock files ({errno.errorcode.get(error.errno or 0, error.errno)})"
            raise RefusedError([self._problem(rule, "choose a run.dir on a file system with flock")]) from None
        return True

    def _is_locked(self) -> bool:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            return not self._try_lock(fd, fcntl.LOCK_SH)  # shared: several ranks may ask at once
        finally:
            os.close(fd)

    def _problem(self, rule: str, remedy: str) -> Problem:
        return Problem(key="run.dir", value=self.path, rule=rule, remedy=remedy)


def _host() -> str:
    """This machine's name; Slurm's where it has one, since several of its nodes may share a machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write_atomic(path: Path, text: str) -> None:
    """Replace a file by one rename, on disk before it is seen."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
