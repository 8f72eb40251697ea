"""What the script of a Slurm job asks (`shardwright explain RUN --verdict=...`): begin, stop, or queue the job again?

Slurm knows exit codes that srun has changed; the run's folder knows what happened. The answer is an exit code, and each
verdict (`diagnosis`) is written down as an event of the run.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from shardwright.conf import compose
from shardwright.conf.schema import Config
from shardwright.pretrain import diagnosis
from shardwright.pretrain.diagnosis import Verdict
from shardwright.pretrain.events import EventLog, read_rows
from shardwright.pretrain.folder import RunFolder

QUEUE_AGAIN = 99
"""Answer to a job script, which knows it by this number; not among the exit codes of runs."""


def decide(
    path: Path, ended: str, *, told: bool, after: str | None = None, environ: Mapping[str, str] = os.environ
) -> int:
    """Judge what has ended.

    Args:
        path: the run's folder.
        ended: srun's exit code of the ranks; "preflight" after the nodes were examined; "before" all that, where the
            verdict is on a former launch that Slurm ended without asking.
        told: whether the script was told to stop.
        after: the job before this one in a chain.
        environ: Slurm's variables.

    Returns:
        0 to go on ("before" and "preflight"), `QUEUE_AGAIN`, or the exit code to leave with.
    """
    folder, job, restart = RunFolder(path), environ["SLURM_JOB_ID"], int(environ.get("SLURM_RESTART_COUNT", "0"))
    config = compose.load(folder.config)
    if ended == "before":
        return _before(folder, config, job, restart, after)
    if ended == "preflight":
        report = folder.path / f"preflight-{job}-{restart}.json"
        verdict = diagnosis.judge_preflight(folder, f"{job}, restart {restart}", report, max_requeues=_most(config))
        if verdict is None:
            return 0
    else:
        verdict = _judge(folder, config, job, restart, code=int(ended), told=told)
    _write_down(folder, config, verdict)
    return QUEUE_AGAIN if verdict.requeue else verdict.exit_code


def _before(folder: RunFolder, config: Config, job: str, restart: int, after: str | None) -> int:
    """Whether a job may begin: what ended before it, by Slurm's requeue or as its predecessor, may be reason not to."""
    if restart:
        job, restart, after = job, restart - 1, None
    elif after:
        job = after
    else:
        return 0
    verdicts = diagnosis.verdicts(read_rows(folder.events))
    known = next((verdict for verdict in verdicts if verdict.launch == f"{job}, restart {restart}"), None)
    if after and not _log(folder, job).exists():  # it was taken out of the queue: what counts is what happened last
        known = verdicts[-1] if verdicts else None
    if known is not None:
        return 0 if known.requeue or not after else _given_up(known)  # somebody may queue a job again all the same
    verdict = _judge(folder, config, job, restart, code=1, told=False)
    _write_down(folder, config, verdict)
    return 0 if verdict.requeue else _given_up(verdict)


def _judge(folder: RunFolder, config: Config, job: str, restart: int, *, code: int, told: bool) -> Verdict:
    return diagnosis.judge(
        folder,
        f"{job}, restart {restart}",
        code=code,
        told=told,
        log=_printed(_log(folder, job), restart),
        max_requeues=_most(config),
    )


def _most(config: Config) -> int:
    """How often a job may follow without a new checkpoint."""
    return config.resilience.max_requeues if config.cluster.requeue or config.cluster.chain > 1 else 0


def _write_down(folder: RunFolder, config: Config, verdict: Verdict) -> None:
    number = max((row["attempt"] for row in read_rows(folder.events)), default=0)
    log = EventLog(folder.events, attempt=number, rank=None)
    log.write("verdict", **verdict.as_event())
    print(f"== {verdict.cause}: {verdict.reason} -> {'queue again' if verdict.requeue else 'stop'}", flush=True)
    if config.cluster.exclude_failed and verdict.nodes:
        folder.exclude(verdict.nodes)


def _given_up(verdict: Verdict) -> int:
    """What a job leaves with that begins no ranks; of a finished run it begins them, which say that it is finished."""
    if verdict.exit_code:
        print(f"== nothing is started: {verdict.cause} ({verdict.reason})", flush=True)
    return verdict.exit_code


def _log(folder: RunFolder, job: str) -> Path:
    return folder.path / f"slurm-{job}.log"


def _printed(log: Path, restart: int) -> str:
    """What a job printed in one of its starts, without the line that begins it; one that is queued again appends."""
    text = log.read_text(errors="replace") if log.exists() else ""
    starts = [part.partition("\n") for part in text.split("\n== job ")]
    return next((body for head, _, body in reversed(starts) if f", restart {restart}," in head), "")
