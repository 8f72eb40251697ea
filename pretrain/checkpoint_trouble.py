"""Checkpoints whose bytes are well and that still do not load: known by the attempts that died over them.

A checkpoint may be whole and kill whoever loads it: a fault of the code that wrote it, a library that cannot read it. A
job that starts again by itself would die over it for ever. So one that failed twice in a row is passed over, as a
damaged one is, until it is asked for by its step.

Nothing is marked on disk. The verdict follows each time anew from what attempts leave in the run's folder anyway: the
event of the checkpoint that was verified, the phase of loading it, no `start` behind, and an error of a rank. An
attempt without an error was ended from outside and says nothing; one that was refused says what is to be changed. A
checkpoint of that step that was written later is another one.

No torch here: the launcher asks before any rank exists.
"""

from dataclasses import dataclass
from pathlib import Path

from shardwright.pretrain import faults
from shardwright.pretrain.events import Row, read_rows

LOADING = "loading the checkpoint"
"""The phase in which ranks load what they have verified."""
MOST_FAILURES = 2
"""So many attempts in a row are the checkpoint's fault and not chance."""


@dataclass(slots=True)
class _Attempt:
    """What one attempt did about checkpoints."""

    loads: Path | None = None
    loading: bool = False
    started: bool = False
    error: str | None = None
    wrote: tuple[Path, ...] = ()


def unloadable(root: Path) -> dict[Path, str]:
    """Why checkpoints of a run are not to be loaded again; one that was written anew since is another one.

    Args:
        root: the run's folder of checkpoints.
    """
    run, attempts = root.parent, dict[int, _Attempt]()
    for row in read_rows(run / "events.jsonl"):
        _add(attempts.setdefault(row["attempt"], _Attempt()), row)
    failures: dict[Path, list[str]] = {}
    for number, attempt in sorted(attempts.items()):
        error = attempt.error or _error_of_a_rank(run / "attempts" / f"{number:03d}" / "errors")
        if attempt.loads and attempt.started:
            failures.pop(attempt.loads, None)
        elif attempt.loads and attempt.loading and error:
            failures.setdefault(attempt.loads, []).append(f"attempt {number}: {error}")
        for path in attempt.wrote:
            failures.pop(path, None)
    here = root.absolute()
    return {
        root / path.name: f"it failed to load {len(found)} times in a row, last in {found[-1]}"
        for path, found in failures.items()
        if len(found) >= MOST_FAILURES and path.parent == here
    }


def _add(attempt: _Attempt, row: Row) -> None:
    """Take in one event."""
    data = row["data"]
    match row["kind"]:
        case "checkpoint_verified":
            attempt.loads = Path(data["path"]).absolute()
        case "phase" if data["phase"] == LOADING:
            attempt.loading = True
        case "start":
            attempt.started = True
        case "checkpoint":
            attempt.wrote += (Path(data["path"]).absolute(),)
        case "fault" if data["exit_code"] != faults.REFUSED:
            attempt.error = str(data["error"])


def _error_of_a_rank(folder: Path) -> str | None:
    """Of an attempt whose rank 0 died before it could tell, under torchrun and srun."""
    found = [failure for failure in faults.collect(folder, wait_seconds=0) if failure.exit_code != faults.REFUSED]
    return faults.culprit(found).error if found else None
