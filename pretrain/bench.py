"""`shardwright bench step|checkpoint`: how fast a training step is, and what our loop costs over a bare one.

The ranks are those of `train`: started by the same launcher, in a folder that is thrown away. They make warm-up steps,
then timed ones, over random tokens, without evaluation and checkpoints (`bench_rank`). `--against bare` measures ours,
bare, bare, ours, each in fresh processes: what drifts slowly (a GPU that grows warm, a neighbour) then stands on both
sides of the ratio.

`bench checkpoint` measures saving and verifying, and what the machine does with the same bytes (`bench_checkpoint`).

This module decides what is measured and in which order, and starts it; `bench_report` makes numbers of it.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.conf import compose
from shardwright.conf.choices import DataSource, LrDecayStyle, WeightDecayIncrStyle
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import (
    bench_checkpoint,
    bench_report,
    checks,
    faults,
    machine,
    plan,
    ranks,
    sweep,
    terminal,
)
from shardwright.pretrain.bench_report import ORDER, Speed
from shardwright.pretrain.folder import RunFolder
from shardwright.pretrain.launch import defaults, launch
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.plan import Plan

RANK_COMMAND = (sys.executable, "-P", "-m", "shardwright.pretrain.bench_rank")
SAVE_COMMAND = (sys.executable, "-P", "-m", "shardwright.pretrain.bench_checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to measure."""

    against: str | None = None
    """"bare" to compare with the bare loop."""
    rounds: int = 1
    """How often ours, bare, bare, ours."""
    warmup: int = 5
    """Steps before the timed ones."""
    steps: int = 20
    """Timed steps."""
    trace: str | None = None
    """File for the trace of one more step of ours."""
    as_json: bool = False
    """Print JSON instead of tables."""


def bench_step(overrides: Sequence[str], options: Options, *, multirun: bool = False) -> int:
    """Measure one configuration, or every point of a sweep in turn, and print what was seen.

    Args:
        overrides: Hydra overrides; with `multirun` in the grammar of its sweeps.
        options: how to measure.
        multirun: whether to sweep.

    Returns:
        The exit code: the first of ranks that failed, else 0. A point that fails does not end a sweep.

    Raises:
        RefusedError: before the first rank.
    """
    found = machine.detect()
    points = sweep.points_of(overrides) if multirun else [sweep.Point(0, tuple(overrides), ())]
    seen: list[tuple[str, Speed | int]] = []
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardwright_bench_") as temporary:
        folders = [RunFolder(Path(temporary) / str(point.index)) for point in points]
        jobs = [
            (point, folder, plan.make_plan(_resolve(point.overrides, folder, options, found)))
            for point, folder in zip(points, folders, strict=True)
        ]
        for point, folder, planned in jobs:
            name = " ".join(point.swept)
            speeds = _measure_all(planned, folder, options, machine.device(planned.config, found), name)
            if isinstance(speeds, int):
                seen.append((name, speeds))
                told.append({"overrides": list(point.overrides), "exit_code": speeds})
                continue
            ratio = bench_report.compare(speeds) if options.against else None
            seen.append((name, speeds[0]))
            whole = bench_report.as_json(planned, found, options.warmup, speeds, ratio)
            told.append({"overrides": list(point.overrides), **whole})
            if not options.as_json and (options.against or not multirun):
                bench_report.show(planned, speeds, ratio)
    if options.as_json:
        print(json.dumps(told if multirun else told[0], indent=2))
    elif multirun and not options.against:
        bench_report.show_points(seen)
    return next((code for _, code in seen if isinstance(code, int)), 0)


def bench_saving(overrides: Sequence[str], options: Options) -> int:
    """Measure saving and verifying against what the machine does without us, and print it; `options.steps` rounds.

    Returns:
        The exit code of the ranks.

    Raises:
        RefusedError: before the first rank.
    """
    found = machine.detect()
    with tempfile.TemporaryDirectory(prefix="shardwright_bench_", dir=Path.cwd()) as temporary:
        folder = RunFolder(Path(temporary) / "run")
        planned = plan.make_plan(_resolve(overrides, folder, options, found))
        told = {"steps": options.steps}
        result = _run_ranks(planned, folder, "checkpoint", told, machine.device(planned.config, found), SAVE_COMMAND)
    if isinstance(result, int):
        return result
    if options.as_json:
        print(json.dumps(bench_checkpoint.as_json(planned, found, result), indent=2))
    else:
        bench_checkpoint.show(planned, result)
    return 0


def _measure_all(planned: Plan, folder: RunFolder, options: Options, device: str, name: str) -> list[Speed] | int:
    """All measurements of one configuration; the exit code of ranks that failed."""
    progress = terminal.console(stderr=True)
    order = ORDER * options.rounds if options.against else ORDER[:1]
    speeds: list[Speed] = []
    for number, loop in enumerate(order, start=1):
        speed = _measure(planned, folder, loop, options, device)
        if isinstance(speed, int):
            return speed
        speeds.append(speed)
        where = " ".join(filter(None, (name, f"{number} of {len(order)}: {loop}")))
        progress.print(f"{where} {speed.tokens_per_second:,.0f} tokens/s", style="dim")
    return speeds


def _resolve(overrides: Sequence[str], folder: RunFolder, options: Options, found: Machine) -> Config:
    """The configuration that is measured, judged by all rules."""
    num_steps = options.warmup + options.steps + bool(options.trace)
    environment = ranks.detect(os.environ)
    if environment is not None:
        rule = f"bench starts its own ranks, and {environment.launcher} made this process one"
        raise RefusedError([Problem(key="bench", value="step", rule=rule, remedy="start it once, from a shell")])

    def rules(config: Config) -> list[Problem]:
        config = measured(config, folder.path, num_steps)
        return [
            *checks.config_problems(config),
            *checks.machine_problems(config, found),
            *checks.own_ranks_problems(config),
        ]

    try:
        config = compose.compose(overrides)
    except RefusedError as error:
        raise compose.complete(error, overrides, rules) from None
    refuse(rules(config))
    return measured(config, folder.path, num_steps)


def measured(config: Config, folder: Path, num_steps: int) -> Config:
    """`config` with everything replaced that has nothing to do with a step: data, length, schedule, checkpoints."""
    schedule = dataclasses.replace(
        config.schedule,
        train_iters=num_steps,
        lr_warmup_iters=0,
        lr_warmup_samples=None,
        lr_warmup_fraction=None,
        lr_decay_style=LrDecayStyle.constant,
        lr_decay_iters=None,
        end_weight_decay=None,
        weight_decay_incr_style=WeightDecayIncrStyle.constant,
        eval_interval=0,
    )
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=str(folder)),
        data=dataclasses.replace(config.data, source=DataSource.mock, rampup_batch_size=None),
        schedule=schedule,
        checkpoint=dataclasses.replace(config.checkpoint, save_interval=0, load=None, load_step=None),
    )


def _measure(planned: Plan, folder: RunFolder, loop: str, options: Options, device: str) -> Speed | int:
    """Run one loop in ranks of its own; the exit code where they fail."""
    told: dict[str, Any] = {"warmup": options.warmup, "steps": options.steps}
    told["trace"] = options.trace if loop == "ours" else None
    result = _run_ranks(planned, folder, loop, told, device, RANK_COMMAND)
    return result if isinstance(result, int) else bench_report.speed_of(planned, loop, options.warmup, result)


def _run_ranks(
    planned: Plan, folder: RunFolder, what: str, told: dict[str, Any], device: str, command: tuple[str, ...]
) -> dict[str, Any] | int:
    """What rank 0 of a measurement wrote; the exit code where ranks fail."""
    folder.create()
    text = compose.dump(planned.config)
    with folder.lock() as lock:
        if not folder.config.exists():
            folder.freeze(text, [])
        attempt = folder.new_attempt(text, {"launcher": "own", "device": device, "load": [], "loop": what, **told})
        stops: list[bool] = []
        outcome = launch(
            attempt,
            world_size=planned.layout.world_size,
            added=defaults(os.environ),
            lock_fd=lock.fd,
            on_stop=lambda: stops.append(True),
            command=command,
        )
    if stops:
        raise KeyboardInterrupt
    if outcome.failure is not None:
        tail = faults.last_lines(attempt.log(outcome.failure.rank)) if outcome.failure.vanished else []
        words = outcome.failure.traceback or "\n".join(tail)
        print(f"{what}: rank {outcome.failure.rank} failed: {outcome.failure.error}\n{words}", file=sys.stderr)
        return outcome.exit_code
    content: dict[str, Any] = json.loads((attempt.path / "result.json").read_text())
    return content
