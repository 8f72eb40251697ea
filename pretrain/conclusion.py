"""Writing down how an attempt ended badly or was stopped: the `fault` and `end` events, and status.json."""

from shardwright.pretrain import faults
from shardwright.pretrain.events import EventLog
from shardwright.pretrain.faults import Failure
from shardwright.pretrain.folder import Attempt, RunFolder

STATES = {0: "done", faults.STOPPED: "stopped"}
"""Exit code -> state; all others are failed."""


def conclude(
    folder: RunFolder,
    attempt: Attempt,
    exit_code: int,
    failure: Failure | None,
    log: EventLog,
    step: int | None,
    seconds: float | None,
) -> None:
    """Write the fault and the status; the `end` event of a run that ended well was written by rank 0.

    An attempt that has lost the folder to another one writes nothing.

    Args:
        folder, attempt: what ended.
        exit_code: of the run.
        failure: the rank to blame, where one failed.
        log: where the events go.
        step: the last one, where it is known.
        seconds: how long the attempt took, where it is known.
    """
    if not folder.is_held_by(attempt):
        return
    state = STATES.get(exit_code, "failed")
    if failure is not None:
        path = attempt.log(failure.rank)
        tail = "\n".join(faults.last_lines(path)) if failure.vanished else None
        log.write("fault", step, **failure.as_event(), log=str(path), tail=tail)
    if state == "failed":
        log.write("end", step, state=state, seconds=seconds, exit_code=exit_code)
    error = None if failure is None else failure.as_event()
    folder.write_status(state, attempt, exit_code=exit_code, step=step, error=error)
