"""What happened to an attempt, and what follows: queue the job again, or stop.

Exit codes do not say it: Slurm puts its own in front, and a machine that vanishes leaves none. So an attempt is judged
by what it wrote: status.json, the ranks' error files, and the lines in which srun names a task that died.

A cause either may pass by itself (a lost node, a broken connection) or will not (a wrong configuration, a full disk).
Each verdict is an event of the run, and the ones before are counted: `resilience.max_requeues` times in a row without a
new checkpoint is the end, and so is a failure at the step where the attempt before failed as well. A run that makes
progress is queued again for as long as it takes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.pretrain import checkpoint_store, faults
from shardwright.pretrain.events import Row, read_rows
from shardwright.pretrain.faults import DAMAGED, FAULT, HANG, NOT_FIT, REFUSED, STOPPED, UNFORESEEN, Failure
from shardwright.pretrain.folder import Attempt, RunFolder

CAUSES: dict[str, tuple[bool, str]] = {
    "done": (False, "the run is finished"),
    "occupied": (False, "another process trains in the run's folder"),
    "cancelled": (False, "somebody cancelled it"),
    "stopped": (True, "it was told to stop, and saved"),
    "preflight": (True, "a node, or the ways between them, is not fit to train"),
    "interrupted": (True, "it vanished without a word: a lost node, a kill, or Slurm queued it again"),
    "lost_rank": (True, "a rank vanished"),
    "hardware": (True, "a GPU or its memory failed"),
    "hang": (True, "a rank gave no sign for longer than it may"),
    "network": (True, "ranks lost each other, and none says why"),
    "timeout": (True, "something took longer than it may"),
    "storage": (True, "a file system failed"),
    "code": (True, "an unforeseen error"),
    "memory_gpu": (False, "a GPU's memory is full"),
    "memory_host": (False, "a machine's memory is full"),
    "disk_full": (False, "a disk or a quota is full"),
    "permission": (False, "a file may not be read or written"),
    "not_finite": (False, "a loss or gradient norm that is not finite"),
    "training": (False, "training itself went wrong"),
    "configuration": (False, "it was refused: configuration, packages, data or checkpoint"),
    "damaged": (False, "data or a checkpoint is damaged"),
}
"""Cause -> whether it may pass by itself, and what it means."""

_TEXTS = (
    ("memory_host", r"posix_fallocate|shared memory segment|out of shared memory|insufficient shared memory"),
    ("disk_full", r"no space left on device|disk quota exceeded|errno (28|122)\b"),
    ("memory_gpu", r"cuda out of memory|outofmemoryerror|cudaerrormemoryallocation|cublas_status_alloc_failed"),
    ("memory_gpu", r"cuda failure (\d+ )?'out of memory'"),
    ("memory_host", r"memoryerror\b|(cannot|can't) allocate memory|oom.?kill|(?<!ran )out of memory|errno 12\b"),
    ("hardware", r"\bxid\b|uncorrectable|\becc\b|nvlink error|hardware error|gpu is lost|fallen off the bus"),
    ("hardware", r"cuda error: (unspecified launch|unknown error|.*(un|are )available)|system not yet initialized"),
    ("permission", r"permission denied|read-only file system|errno (1|13|30)\b"),
    (
        "storage",
        r"stale (nfs )?file handle|input/output error|transport endpoint|file write failed|errno (5|107|108|116)\b",
    ),
    ("not_finite", r"the (loss|gradient norm) is (nan|-?inf)"),
    ("code", r"illegal memory access|device-side assert"),
)
"""Cause -> what an error says of it, in any case of letters; the first that is found counts."""
_TIMEOUT = re.compile(r"timed? ?out|timeout|watchdog", re.IGNORECASE)
_NCCL_TIMEOUT = "collective operation timeout"
"""Source: torch 2.11, ProcessGroupNCCL.cpp."""
_SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<task>\d+)[^:]*: (?P<end>.*)")
"""How srun names a task that ended badly. Source: slurm/src/srun/libsrun/launch.c."""
_ENDED = re.compile(r"\*\*\* JOB \S+ ON (?P<host>\S+) CANCELLED AT \S+ DUE TO (?P<why>[^*]+?) \*\*\*")
"""How Slurm says that it ended a job: JOB REQUEUE, TIME LIMIT, NODE FAILURE, PREEMPTION. Source: slurmstepd/req.c."""
_OCCUPIED = re.compile(r"another process (trains|has begun attempt \d+) there[^;\n]*")
"""How a start is refused whose folder has a living holder (`folder.RunFolder`)."""
_VICTIM = re.compile(r"terminated|killed|exited with exit code (75|143|137)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What happened to one launch of a run, and what follows; also the data of a `verdict` event."""

    launch: str
    """Which launch: `4242, restart 1`."""
    cause: str
    """One of `CAUSES`."""
    reason: str
    """In words, with the rank and host to blame where they are known."""
    step: int | None
    """Last step that the attempt trained."""
    saved: int
    """Newest whole checkpoint; 0 for none."""
    requeue: bool
    exit_code: int
    """Of the run, where it is not queued again."""
    host: str = ""
    """Of the rank to blame; empty where none is."""
    nodes: tuple[str, ...] = ()
    """Nodes that the next try does better without: hardware that failed, a hang, a rank lost there twice in a row."""

    def as_event(self) -> dict[str, Any]:
        """Arguments of `EventLog.write`, the step among them."""
        return asdict(self)


def judge(folder: RunFolder, launch: str, *, code: int, told: bool, log: str, max_requeues: int) -> Verdict:
    """Judge the launch that has ended.

    Args:
        folder: the run.
        launch: job and restart; attempts of Slurm's job 4242 have the launch id `slurm 4242.0, restart 1`.
        code: what srun ended with.
        told: whether the job's script was told to stop.
        log: what the job printed in this launch.
        max_requeues: `resilience.max_requeues`.
    """
    events = read_rows(folder.events)
    attempt = attempt_of(folder, launch)
    occupied = _OCCUPIED.search(log)
    if occupied and (attempt is None or folder.status().get("state") == "running"):
        # a second incarnation of one job: the attempt by that name is the first one's, which lives
        cause, reason, exit_code, host = "occupied", occupied.group(), REFUSED, ""
    elif attempt is None:
        cause, reason, exit_code, host = *_refused_or_killed(code, told, log), ""
    else:
        cause, reason, exit_code, host = _attempt(folder, attempt, log)
    if (folder.path / "cancel").exists() and cause != "done":
        cause, reason = "cancelled", CAUSES["cancelled"][1]
    saved = max((found.step for found in checkpoint_store.committed(folder.checkpoints)), default=0)
    step = None if attempt is None else last_step(folder, attempt.number)
    before = verdicts(events)
    verdict = Verdict(
        launch=launch,
        cause=cause,
        reason=reason,
        step=step,
        saved=saved,
        requeue=CAUSES[cause][0],
        exit_code=exit_code,
        host=host,
        nodes=_nodes_to_blame(cause, host, before),
    )
    return _bounded(verdict, before, max_requeues)


def judge_preflight(folder: RunFolder, launch: str, report: Path, *, max_requeues: int) -> Verdict | None:
    """Judge the launch whose nodes were examined; None where all are fit.

    Args:
        folder: the run.
        launch: job and restart.
        report: what `preflight` wrote.
        max_requeues: `resilience.max_requeues`.
    """
    try:
        told = json.loads(report.read_text())
    except (OSError, ValueError):
        told = {"fit": False, "bad_nodes": [], "group": {"detail": f"preflight left no report {report.name}"}}
    if told["fit"]:
        return None
    said = [f"{bad['node']}: {'; '.join(bad['reasons'])}" for bad in told["bad_nodes"]]
    saved = max((found.step for found in checkpoint_store.committed(folder.checkpoints)), default=0)
    verdict = Verdict(
        launch=launch,
        cause="preflight",
        reason=", ".join(said) or str((told["group"] or {}).get("detail", CAUSES["preflight"][1])),
        step=None,
        saved=saved,
        requeue=True,
        exit_code=NOT_FIT,
        nodes=tuple(bad["node"] for bad in told["bad_nodes"]),
    )
    return _bounded(verdict, verdicts(read_rows(folder.events)), max_requeues)


def _bounded(verdict: Verdict, before: Sequence[Verdict], max_requeues: int) -> Verdict:
    """The verdict, without a requeue where there were enough of them."""
    against = _against(verdict, before, max_requeues) if verdict.requeue else None
    return replace(verdict, requeue=False, reason=f"{verdict.reason}; {against}") if against else verdict


def verdicts(events: Sequence[Row]) -> list[Verdict]:
    """The verdicts among the events of a run, in their order."""
    found = []
    for row in events:
        if row["kind"] == "verdict":
            nodes = tuple(row["data"].get("nodes", ()))
            found.append(Verdict(**{**row["data"], "step": row["step"], "nodes": nodes}))
    return found


def attempt_of(folder: RunFolder, launch: str) -> Attempt | None:
    """The attempt that a launch began, if it came that far."""
    job, _, restart = launch.partition(", ")
    by = rf"slurm {re.escape(job)}\.\d+, {re.escape(restart)}"
    for path in sorted(folder.attempts.glob("[0-9]*"), reverse=True):
        try:
            attempt = Attempt.at(path)
            launch_id = attempt.launch["launch_id"]
        except (OSError, ValueError, KeyError):
            continue  # killed while it was written
        if re.fullmatch(rf"{by}|torchrun {by} at .*", launch_id):
            return attempt
    return None


def last_step(folder: RunFolder, attempt: int) -> int | None:
    """The last step that an attempt trained; None if it trained none."""
    paths = (folder.metrics, *folder.attempts.glob("*/removed_metrics.jsonl"))
    steps = [row["step"] for path in paths for row in read_rows(path) if row.get("attempt") == attempt]
    return max(steps, default=None)


def cause_of(failure: Failure, last_words: str = "") -> str:
    """The cause that the failure of one rank speaks of.

    Args:
        failure: of that rank.
        last_words: end of its log, where a library aborted it; NCCL's watchdog says why, and then aborts.
    """
    if failure.error_type == HANG:
        return "hang"
    text = f"{failure.error_type or ''}: {failure.error}\n{last_words}"
    for cause, pattern in _TEXTS:
        if re.search(pattern, text, re.IGNORECASE):
            return cause
    if failure.exit_code == REFUSED:
        return "configuration"
    if failure.exit_code == DAMAGED:
        return "damaged"
    if failure.vanished:
        return "timeout" if _NCCL_TIMEOUT in last_words else "lost_rank"
    if failure.communication or failure.error_type in ("TimeoutError", "Timeout"):
        return "timeout" if _TIMEOUT.search(text) else "network"
    return "training" if failure.exit_code == FAULT else "code"


def _nodes_to_blame(cause: str, host: str, before: Sequence[Verdict]) -> tuple[str, ...]:
    """Nodes to leave out of the next try: one lost rank may be an accident, the next one on the same node is none."""
    again = cause == "lost_rank" and bool(before) and (before[-1].cause, before[-1].host) == (cause, host)
    return (host,) if host and (cause in ("hardware", "hang") or again) else ()


def _attempt(folder: RunFolder, attempt: Attempt, log: str) -> tuple[str, str, int, str]:
    """Cause, reason, exit code and the host to blame of an attempt that has begun."""
    status = folder.status()
    state = status.get("state") if status.get("attempt_id") == attempt.id else None
    if state == "done":
        return "done", CAUSES["done"][1], 0, ""
    if state == "stopped":
        return "stopped", CAUSES["stopped"][1], STOPPED, ""
    ended = _ENDED.search(log)
    if ended:  # what ranks say then follows from it
        return "interrupted", f"Slurm ended the job on {ended['host']}: {ended['why'].lower()}", UNFORESEEN, ""
    failures = faults.collect(attempt.errors, wait_seconds=0)
    spoken = {failure.rank for failure in failures}
    failures += [failure for failure in _named_by_srun(log) if failure.rank not in spoken]
    if failures:
        failure = faults.culprit(failures)
        reason = f"rank {failure.rank} on {failure.host}: {failure.error}"
        aborted = failure.vanished and "abort" in failure.error.lower()
        last_words = "\n".join(faults.last_lines(attempt.log(failure.rank), 40)) if aborted else ""
        host = "" if failure.error_type == HANG and failure.position is None else failure.host
        return cause_of(failure, last_words), reason, failure.exit_code, host
    if state == "failed":
        error: dict[str, Any] = status.get("error") or {}
        code = int(status.get("exit_code") or UNFORESEEN)
        return "interrupted", str(error.get("error", CAUSES["interrupted"][1])), code, ""
    return "interrupted", CAUSES["interrupted"][1], UNFORESEEN, ""


def _named_by_srun(log: str) -> list[Failure]:
    """Tasks that srun saw die and that are no victims of the first; task and rank are the same number."""
    found: list[Failure] = []
    for line in log.splitlines():
        match = _SRUN.search(line)
        if match and not _VICTIM.search(match["end"]):
            found.append(
                Failure(
                    rank=int(match["task"]),
                    host=match["host"],
                    exit_code=FAULT,
                    error_type=None,
                    error=match["end"],
                    traceback=None,
                    time=float(len(found)),
                )
            )
    return found


def _refused_or_killed(code: int, told: bool, log: str) -> tuple[str, str, int]:
    """The same where no attempt was begun: refused, or ended before it came that far."""
    if told:
        return "interrupted", "it was told to stop before it had begun", STOPPED
    if code == REFUSED or re.search(r"Exited with exit code 2\b|^ *exitcode *: 2\b", log, re.MULTILINE):
        said = [line.removeprefix("  - ") for line in log.splitlines() if line.startswith("  - ")]  # RefusedError
        return "configuration", said[0] if said else CAUSES["configuration"][1], REFUSED
    return "interrupted", f"the ranks began no attempt (srun ended with {code})", UNFORESEEN


def _against(now: Verdict, before: Sequence[Verdict], max_requeues: int) -> str | None:
    """Why a job is not queued again though its cause may pass; None if it is."""
    if now.cause != "stopped" and before and before[-1].requeue and now.step is not None:
        former = before[-1]
        if (former.cause, former.step, former.saved) == (now.cause, now.step, now.saved):
            return f"two attempts in a row ended like this after step {now.step}"
    count = 0
    for verdict in reversed(before):
        if not verdict.requeue or verdict.saved != now.saved:
            break
        count += 1
    if count >= max_requeues:
        times = "never" if max_requeues == 0 else f"{count} times in a row without a new checkpoint"
        return f"queued again {times} (resilience.max_requeues={max_requeues})"
    return None
