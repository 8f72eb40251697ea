"""What can go wrong while ranks train, and which rank is to blame.

A rank that fails writes one small file, `errors/rank_00001.json`, before it leaves; a rank that vanishes (killed, a
crash in native code, `os._exit`) writes none. When one rank fails the others soon fail too, because their collectives
break. So the first error to arrive is often a victim's: `culprit` prefers ranks that vanished, then errors that are
about anything but communication, and only then the earliest. Of ranks that hang together the one to blame is stopped,
or behind the others, or the one that waits in no collective.
"""

import json
import re
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwright.conf.problems import RefusedError

UNFORESEEN, REFUSED, FAULT, DAMAGED, NOT_FIT, STOPPED = 1, 2, 3, 4, 5, 75
"""Exit codes besides 0: a bug; refused before the first step; training fault; damaged content;
a node that is not fit; stopped after saving."""

_COMMUNICATION_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"} | {
    kind.__name__ for kind in (BrokenPipeError, ConnectionAbortedError, ConnectionRefusedError, ConnectionResetError)
}
_COMMUNICATION_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|\bnccl|\bgloo\b|gloo/transport|timed out waiting|"
    r"watchdog|socket|peer (closed|has)",
    re.IGNORECASE,
)
_TAIL_LINES = 8
HANG = "Hang"
"""`Failure.error_type` of a rank that its guardian ended (`watch`)."""

SPEAK_SECONDS = 2.0
"""After the first failure the other ranks have this long to write down what they saw."""


class TrainingFault(RuntimeError):
    """Training itself went wrong: a non-finite loss, a failed self-check, a lost rank."""

    exit_code = FAULT


class DamagedError(RuntimeError):
    """The ranks found that the content of a checkpoint is not what was written, and no other one is left."""

    exit_code = DAMAGED


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank ended badly; also the content of its error file."""

    rank: int
    host: str
    exit_code: int
    """Exit code of the run if this rank is to blame."""
    error_type: str | None
    """Name of the exception; None for a rank that vanished."""
    error: str
    traceback: str | None
    time: float
    """Seconds since the epoch."""
    position: Sequence[int] | None = None
    """Of a rank that hangs: 0 if it is stopped, its number of beats, 1 if it waits in a collective. The rank with the
    least hangs, the others wait for it; None if they are all alike."""

    @property
    def vanished(self) -> bool:
        """Whether the rank left without an error of its own."""
        return self.error_type is None

    @property
    def communication(self) -> bool:
        """Whether the error is about talking to other ranks, and therefore probably a consequence."""
        if self.error_type in _COMMUNICATION_TYPES:
            return True
        return self.error_type in ("RuntimeError", "OSError") and bool(_COMMUNICATION_TEXT.search(self.error))

    @classmethod
    def of(cls, error: BaseException, *, rank: int, host: str) -> "Failure":
        """The failure that `error` is; its `exit_code` attribute counts, a broken connection means a lost rank (3)."""
        failure = cls(
            rank=rank,
            host=host,
            exit_code=getattr(error, "exit_code", UNFORESEEN),
            error_type=type(error).__name__,
            error=str(error) or type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
        )
        return failure.with_exit_code(FAULT) if failure.communication else failure

    def with_exit_code(self, exit_code: int) -> "Failure":
        """The same failure with another exit code."""
        return Failure(**{**asdict(self), "exit_code": exit_code})

    def as_event(self) -> dict[str, object]:
        """Data of a `fault` event."""
        known = (None, HANG, TrainingFault.__name__, RefusedError.__name__, DamagedError.__name__)
        kind = "" if self.error_type in known else f"{self.error_type}: "
        return {"rank": self.rank, "host": self.host, "error": f"{kind}{self.error}", "exit_code": self.exit_code}

    def write(self, folder: Path) -> None:
        """Put the error file into `folder`, whole or not at all."""
        path = error_file(folder, self.rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)


def error_file(folder: Path, rank: int) -> Path:
    """Where `rank` writes its error."""
    return folder / f"rank_{rank:05d}.json"


def read(folder: Path, rank: int) -> Failure | None:
    """The failure that a rank wrote, if it did."""
    path = error_file(folder, rank)
    return Failure(**json.loads(path.read_text())) if path.exists() else None


def collect(folder: Path, wait_seconds: float = SPEAK_SECONDS) -> list[Failure]:
    """All failures that ranks wrote, after giving those that fail a moment later the time to do so."""
    time.sleep(wait_seconds)
    return [Failure(**json.loads(path.read_text())) for path in sorted(folder.glob("rank_*.json"))]


def judge(returncode: int, *, rank: int, errors: Path, seen: float) -> Failure | None:
    """How a rank process ended.

    Args:
        returncode: exit code, or minus the signal that killed it (`subprocess.Popen.returncode`).
        rank: global rank.
        errors: folder of error files of this attempt.
        seen: when the end was noticed, seconds since the epoch.

    Returns:
        None for a rank that ended well (0) or as it was told to (75).
    """
    if returncode in (0, STOPPED):
        return None
    failure = read(errors, rank)
    if failure is not None:
        return failure
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
        text = f"killed by {name}"
        if -returncode == signal.SIGKILL:
            text += " (if nobody sent it, the kernel ran out of memory: see dmesg)"
    else:
        text = f"exit code {returncode}, without an error of its own"
    exit_code = DAMAGED if returncode == DAMAGED else FAULT
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        exit_code=exit_code,
        error_type=None,
        error=text,
        traceback=None,
        time=seen,
    )


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: vanished ranks first, then hanging ones, own errors, communication.

    A rank that its communication library aborted (SIGABRT, NCCL's watchdog) is a victim like one that raised.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.vanished:
            return (2 if "SIGABRT" in failure.error else 0), failure.time
        if failure.error_type == HANG:
            return 1, failure.time
        return (3 if failure.communication else 2), failure.time

    first = min(failures, key=order)
    return first if first.error_type != HANG else _behind([each for each in failures if each.error_type == HANG])


def _behind(hanging: Sequence[Failure]) -> Failure:
    """The hanging rank that the others wait for; where they are all alike, one of them that says so."""
    positions = [tuple(failure.position or ()) for failure in hanging]
    behind = [failure for failure, position in zip(hanging, positions, strict=True) if position == min(positions)]
    first, others = behind[0], ", ".join(str(failure.rank) for failure in behind[1:])
    if not others:
        return first
    if len(behind) < len(hanging):
        return replace(first, error=f"{first.error}; so do ranks {others}, and the rest wait for them")
    return replace(first, position=None, error=f"{first.error}; ranks {others} stand at the same place, none is behind")


def last_lines(log: Path, count: int = _TAIL_LINES) -> list[str]:
    """The last lines of a rank's log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
