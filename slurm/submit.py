"""`shardwright submit`: from overrides to a job in Slurm's queue, in about a second, and then it returns.

Composed once, judged by all config rules, frozen into the run's folder; the job script names that folder and every rank
starts with the frozen file (`train run.dir=FOLDER`). A sweep is one job array with a folder per point, named as
`train -m` names them, so both can go on with each other's. Points that are done are left out.

Machine rules are the job's: a login node has no GPUs and perhaps no torch.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.conf import compose
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import checks, lint, start, sweep
from shardwright.pretrain.folder import RunFolder, write_atomic
from shardwright.slurm import programs, render
from shardwright.slurm.render import Point

SCRIPT, JOBS, POINTS, CANCEL = "job.sbatch", "jobs.jsonl", "sweep.json", "cancel"
"""In a run's or a sweep's folder: the script, a line per submission, the table of points; and what cancels a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What is to be submitted; nothing has been written."""

    folder: Path
    """Of the run, or of the sweep."""
    configs: Sequence[Config]
    """One per point that is to be run."""
    points: Sequence[Point]
    typed: Sequence[Sequence[str]]
    """What each point was typed as."""
    table: Sequence[Mapping[str, Any]]
    """Every point of a sweep, those that are done too; empty for a run."""
    script: str

    @property
    def array(self) -> bool:
        """Whether it is a sweep."""
        return bool(self.table)

    @property
    def warnings(self) -> list[str]:
        """What the job's environment should not hold: variables that tune or debug, one sentence each."""
        cluster = self.configs[0].cluster
        exported = {name: os.environ.get(name) for name in cluster.export}
        return [
            *(f"cluster.export: {left}" for left in lint.left_set(exported)),
            *(f"cluster.setup: {left}" for left in lint.left_set(lint.assignments(cluster.setup))),
        ]

    def send(self) -> list[str]:
        """Write folders, frozen configurations and script, and submit; the id of the job, or of all jobs of a chain.

        Raises:
            RefusedError: a folder cannot be used, is in the queue already, or Slurm refuses.
        """
        refuse(_queued(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for config, point, typed in zip(self.configs, self.points, self.typed, strict=True):
            folder = RunFolder(point.folder)
            folder.create()
            if not folder.config.exists():
                folder.freeze(compose.dump(config), typed)
            (folder.path / CANCEL).unlink(missing_ok=True)
        if self.table:
            write_atomic(self.folder / POINTS, json.dumps(self.table, indent=1) + "\n")
        path = self.folder / SCRIPT
        write_atomic(path, self.script)
        path.chmod(0o700)
        cluster, jobs = self.configs[0].cluster, list[str]()
        for _ in range(cluster.chain):
            jobs.append(programs.sbatch(path, export=render.exported(cluster), after=jobs[-1] if jobs else None))
            with (self.folder / JOBS).open("a") as file:
                file.write(json.dumps({"job": jobs[-1], "points": [point.index for point in self.points]}) + "\n")
        return jobs


def prepare(overrides: Sequence[str]) -> Submission:
    """One run.

    Raises:
        RefusedError: everything that is wrong with it.
    """
    try:
        config = compose.compose(overrides)
    except RefusedError as error:
        raise compose.complete(error, overrides, checks.config_problems) from None
    config, point = _point(config, overrides, 0)
    refuse(checks.config_problems(config))
    name = config.run.name
    return Submission(
        folder=point.folder,
        configs=[config],
        points=[point],
        typed=[overrides],
        table=[],
        script=render.script(config, [point], name=name, log_folder=point.folder),
    )


def prepare_sweep(overrides: Sequence[str]) -> Submission:
    """Every point of a sweep.

    Raises:
        RefusedError: everything that is wrong with any point, or the points ask for different machines.
    """
    points = sweep.points_of(overrides)
    folder, composed = sweep.check(points, checks.config_problems)
    folder = folder.absolute()
    configs: list[Config] = []
    jobs: list[Point] = []
    typed: list[list[str]] = []
    for point, config in zip(points, composed, strict=True):
        own = folder / point.name
        if RunFolder(own).status().get("state") == "done":
            continue
        typed.append([*point.overrides, compose.override("run.dir", str(own))])
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(own)))
        config, job = _point(config, typed[-1], point.index)
        configs.append(config)
        jobs.append(job)
    if not jobs:
        raise RefusedError([Problem(key="run.dir", value=folder, rule="every point of this sweep is done")])
    if any(config.cluster != configs[0].cluster for config in configs):
        rule = "differs between the points, and one job array asks for one kind of machine"
        raise RefusedError([Problem(key="cluster", rule=rule, remedy="submit one sweep per kind")])
    if (chain := configs[0].cluster.chain) > 1:
        rule = "a sweep is one job array, and a chain is of single runs"
        remedy = "cluster.chain=1; the same command again submits the points that are not done"
        raise RefusedError([Problem(key="cluster.chain", value=chain, rule=rule, remedy=remedy)])
    return Submission(
        folder=folder,
        configs=configs,
        points=jobs,
        typed=typed,
        table=[
            {"index": point.index, "overrides": list(point.swept), "folder": str(folder / point.name)}
            for point in points
        ],
        script=render.script(configs[0], jobs, name=folder.name, log_folder=folder, array=True),
    )


def jobs_of(folder: Path) -> list[str]:
    """Jobs that were submitted for a run or a sweep, the oldest first."""
    path = folder / JOBS
    return [json.loads(line)["job"] for line in path.read_text().splitlines()] if path.exists() else []


def _point(config: Config, overrides: Sequence[str], index: int) -> tuple[Config, Point]:
    """The configuration that a point runs with, and what its ranks are told.

    A run that lives already goes on as with `train`: what was typed is put on top of its first start's. Then the job
    types it too, and the ranks find the same differences.
    """
    folder = RunFolder(Path(config.run.dir).absolute())
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder.path)))
    told = [compose.override("run.dir", str(folder.path))]
    if folder.config.exists():
        config, differences = start.resumed(config, folder, overrides)
        if differences:
            told = [*(text for text in overrides if not text.lstrip("+").startswith("run.dir=")), *told]
    return config, Point(index=index, folder=folder.path, overrides=told)


def _queued(folder: Path) -> list[Problem]:
    """Jobs of this folder that still wait or run; a second one would wait for the folder and be refused there."""
    rule = "is still in the queue with this folder"
    remedy = f"shardwright submit status {folder}, or submit cancel"
    return [
        Problem(key="job", value=f"{queued.job} ({queued.state})", rule=rule, remedy=remedy)
        for queued in programs.queue(jobs_of(folder))
    ]
