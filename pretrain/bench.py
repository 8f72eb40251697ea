"""`shardwright bench step`: how fast the training step is, and what our loop costs over a bare megatron-core loop.

The ranks are those of `train`: started by the same launcher, in a folder that is thrown away. They make warm-up steps,
then timed ones, over random tokens, without evaluation and checkpoints (`bench_rank`). `--against bare` measures ours,
bare, bare, ours, each in fresh processes: what drifts slowly (a GPU that grows warm, a neighbour) then stands on both
sides of the ratio.

This module decides what is measured and in which order, and starts it; `bench_report` makes numbers of it.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardwright.conf import compose
from shardwright.conf.choices import DataSource, LrDecayStyle, WeightDecayIncrStyle
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import bench_report, checks, faults, machine, plan, ranks
from shardwright.pretrain.bench_report import ORDER, Speed
from shardwright.pretrain.folder import RunFolder
from shardwright.pretrain.launch import defaults, launch
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.plan import Plan

RANK_COMMAND = (sys.executable, "-P", "-m", "shardwright.pretrain.bench_rank")


def bench_step(overrides: Sequence[str], *, against: str | None, warmup: int, steps: int, as_json: bool) -> int:
    """Measure, and print what was seen.

    Args:
        overrides: Hydra overrides.
        against: "bare" to compare with the bare loop, else None.
        warmup: steps before the timed ones, at least 0.
        steps: timed steps, at least 1.
        as_json: print JSON instead of tables.

    Returns:
        The exit code: that of the ranks that failed, else 0.

    Raises:
        RefusedError: before the first rank.
    """
    found = machine.detect()
    with tempfile.TemporaryDirectory(prefix="shardwright_bench_") as temporary:
        folder = RunFolder(Path(temporary))
        planned = plan.make_plan(_resolve(overrides, folder, warmup + steps, found))
        speeds: list[Speed] = []
        progress = Console(stderr=True, highlight=False)
        order = ORDER if against else ORDER[:1]
        for number, loop in enumerate(order, start=1):
            speed = _measure(planned, folder, loop, warmup, machine.device(planned.config, found))
            if isinstance(speed, int):
                return speed
            speeds.append(speed)
            progress.print(f"{number} of {len(order)}: {loop} {speed.tokens_per_second:,.0f} tokens/s", style="dim")
    ratio = bench_report.compare(speeds) if against else None
    if as_json:
        print(json.dumps(bench_report.as_json(planned, found, warmup, speeds, ratio), indent=2))
    else:
        bench_report.show(planned, speeds, ratio)
    return 0


def _resolve(overrides: Sequence[str], folder: RunFolder, num_steps: int, found: Machine) -> Config:
    """The configuration that is measured, judged by all rules."""
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


def _measure(planned: Plan, folder: RunFolder, loop: str, warmup: int, device: str) -> Speed | int:
    """Run one loop in ranks of its own; the exit code where they fail."""
    folder.create()
    text = compose.dump(planned.config)
    with folder.lock() as lock:
        if not folder.config.exists():
            folder.freeze(text, [])
        told = {"launcher": "own", "device": device, "load": None, "loop": loop, "warmup": warmup}
        attempt, stops = folder.new_attempt(text, told), []
        outcome = launch(
            attempt,
            world_size=planned.layout.world_size,
            added=defaults(os.environ),
            lock_fd=lock.fd,
            on_stop=lambda: stops.append(True),
            command=RANK_COMMAND,
        )
    if stops:
        raise KeyboardInterrupt
    if outcome.failure is not None:
        tail = faults.last_lines(attempt.log(outcome.failure.rank)) if outcome.failure.vanished else []
        words = outcome.failure.traceback or "\n".join(tail)
        print(f"{loop}: rank {outcome.failure.rank} failed: {outcome.failure.error}\n{words}", file=sys.stderr)
        return outcome.exit_code
    return bench_report.speed_of(planned, loop, warmup, json.loads((attempt.path / "result.json").read_text()))
