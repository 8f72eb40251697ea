"""`shardwright submit status FOLDER` and `submit cancel FOLDER`, of a run or of a sweep."""

import json
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.table import Table

from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain.folder import RunFolder
from shardwright.slurm import programs
from shardwright.slurm.submit import CANCEL, JOBS, POINTS, jobs_of


def status(folder: Path) -> Table:
    """A row per point: what Slurm says of its job, and what the run's folder says."""
    jobs = _jobs(folder)
    queued = {entry.job: entry for entry in programs.queue(jobs)}
    table = Table(box=box.SIMPLE_HEAD, title=str(folder), title_justify="left")
    for name in ("", "overrides", "job", "in the queue", "run", "step"):
        table.add_column(name, overflow="fold", justify="right" if name in ("", "step") else "left")
    for index, overrides, run in _points(folder):
        names = [job if index is None else f"{job}_{index}" for job in jobs]
        entry = next((queued[name] for name in reversed(names) if name in queued), None)
        state = run.status()
        ended = f" (exit code {state['exit_code']})" if state.get("exit_code") else ""
        table.add_row(
            "" if index is None else str(index),
            overrides,
            entry.job if entry else names[-1],
            f"{entry.state} {entry.reason}" if entry else "gone",
            f"{state.get('state', 'not begun')}{ended}",
            str(state.get("step") or ""),
        )
    return table


def cancel(folder: Path, *, now: bool = False) -> list[str]:
    """Cancel what waits, let what runs save and stop; `now` ends that too. Lines that say what was done."""
    said = []
    for _, _, run in _points(folder):
        if run.path.is_dir():
            (run.path / CANCEL).touch(mode=0o600)
    for entry in programs.queue(_jobs(folder)):
        if entry.state == "RUNNING" and not now:
            programs.scancel("--signal=USR1", "--batch", entry.job)
            said.append(f"{entry.job} is told to save and stop")
        else:
            programs.scancel(entry.job)
            said.append(f"{entry.job} ({entry.state}) is cancelled")
    return said or ["nothing is in the queue"]


def _jobs(folder: Path) -> list[str]:
    jobs = jobs_of(folder)
    if not jobs:
        rule = f"nothing was submitted from there: it holds no {JOBS}"
        raise RefusedError([Problem(key="FOLDER", value=folder, rule=rule, remedy="RUN_DIR, or RUN_DIR_sweep")])
    return jobs


def _points(folder: Path) -> Iterator[tuple[int | None, str, RunFolder]]:
    """Index, overrides and folder of every point; of a run it is itself."""
    path = folder / POINTS
    if not path.exists():
        yield None, "", RunFolder(folder)
        return
    for point in json.loads(path.read_text()):
        yield point["index"], " ".join(point["overrides"]), RunFolder(Path(point["folder"]))
