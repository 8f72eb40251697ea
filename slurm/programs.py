"""Slurm's own programs: called with argument lists, never through a shell."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.conf.problems import Problem, RefusedError

_LIMIT_SECONDS = 60
"""A controller that does not answer for so long is an error; Slurm's own limits are shorter."""


@dataclass(frozen=True, slots=True)
class Queued:
    """One job, or one task of an array, that Slurm knows."""

    job: str
    """`42`, `42_3` for a task of an array, `42_[1-3]` for tasks that wait together."""
    state: str
    """PENDING, RUNNING and so on."""
    reason: str
    """Why it waits, or its nodes."""


def bin_folder() -> Path:
    """Where sbatch is.

    Raises:
        RefusedError: it is nowhere.
    """
    found = shutil.which("sbatch")
    if found is None:
        rule = "there is no sbatch in PATH: this machine submits no jobs"
        raise RefusedError(
            [Problem(key="submit", value="sbatch", rule=rule, remedy="go to a login node of the cluster")]
        )
    return Path(found).parent


def sbatch(script: Path, *, export: str, after: str | None = None) -> str:
    """Submit a script; the job's id.

    Args:
        script: the script.
        export: names of the variables that go along.
        after: a job that has to end first, however it ends; the script is told it as its first argument.

    `--export` is said again on the command line, where no SBATCH_EXPORT of the user's environment overrides it. Slurm
    hands this process's umask on to the job.

    Raises:
        RefusedError: Slurm's own words.
    """
    order = [f"--dependency=afterany:{after}", "--kill-on-invalid-dep=yes"] if after else []
    told = [after] if after else []
    done = _run("sbatch", ["--parsable", f"--export={export}", *order, str(script), *told], umask=0o077)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        rule = "; ".join(line.removeprefix("sbatch: error: ") for line in said)
        raise RefusedError([Problem(key="sbatch", value=script, rule=rule, remedy="cluster.* says what is asked for")])
    return done.stdout.strip().partition(";")[0]  # JOB, or JOB;CLUSTER


def queue(jobs: Sequence[str]) -> list[Queued]:
    """Those of these jobs that wait or run.

    Raises:
        RefusedError: Slurm does not answer.
    """
    found: list[Queued] = []
    if not jobs:
        return found
    mine = _run("squeue", ["--noheader", "--me", "--array", "--format=%i|%F|%T|%R"])
    if mine.returncode != 0:
        raise RefusedError([Problem(key="squeue", value=" ".join(jobs), rule=mine.stderr.strip() or "no answer")])
    for line in mine.stdout.splitlines():
        job, base, state, reason = line.strip().split("|", 3)
        if base in jobs:
            found.append(Queued(job, state, reason))
    return found


def scancel(*arguments: str) -> None:
    """Cancel or signal jobs; those that are gone already are no error."""
    _run("scancel", arguments)


def _run(program: str, arguments: Sequence[str], umask: int = -1) -> "subprocess.CompletedProcess[str]":
    command = [str(bin_folder() / program), *arguments]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_SECONDS,
            umask=umask,
            env={**os.environ, "LC_ALL": "C"} if program != "sbatch" else None,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise RefusedError([Problem(key=program, rule=f"does not answer: {error}")]) from None
