"""SIGKILL at random moments, again and again: no state that cannot be read, no committed checkpoint lost, same weights.

`make torture` kills a hundred times; the suite a few. A kill hits the launcher, or any process below it: a rank, one
that writes a checkpoint, a guardian. The seed is printed, and TORTURE_SEED repeats it (moments still vary).
"""

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from shardwright.pretrain import checkpoint_integrity, checkpoint_store

from . import commands
from .engines import full_tensors
from .harness import RunRanks

NUM_KILLS = int(os.environ.get("TORTURE_KILLS", "5"))
SEED = int(os.environ.get("TORTURE_SEED", str(time.time_ns() % 2**32)))
STEPS_PER_KILL = 15
"""About as many as an attempt gets to, so that the last kills still find something to do."""
MOMENTS_STEPS, MOMENTS_SECONDS = 14, 0.5
"""A kill comes after so many steps of an attempt at most, within this time; one in five comes while it starts."""
START_SECONDS = 8.0
WHOLE_SECONDS = 300.0 + 3.0 * NUM_KILLS * STEPS_PER_KILL
"""Limit of a run to its end; a step takes a twentieth of a second on a machine of its own, and one on a shared one."""
OVERRIDES = (
    *commands.SMALL,
    *commands.TWO_TENSOR_PARALLEL,
    "model.hidden_dropout=0.1",
    "schedule.eval_interval=0",
    "checkpoint.save_interval=2",
    "checkpoint.keep_last=2",
    f"schedule.train_iters={NUM_KILLS * STEPS_PER_KILL}",
)

pytestmark = pytest.mark.slow  # a start takes ten seconds, and there is one after every kill


@dataclass(slots=True)
class Watch:
    """What was seen of a run's checkpoints, between and after kills."""

    run_dir: Path
    newest: int = 0
    """The newest step that was ever seen committed."""
    problems: list[str] = field(default_factory=list)

    def look(self) -> None:
        """While processes write: the pointer never names what is not committed, and one whole is always there."""
        root = self.run_dir / "checkpoints"
        with contextlib.suppress(FileNotFoundError):
            named = root / (root / "latest").read_text().strip()
            whole = [checkpoint.step for checkpoint in checkpoint_store.committed(root)]
            if not whole:  # a checkpoint may be removed between two looks of this one, the newest not
                whole = [checkpoint.step for checkpoint in checkpoint_store.committed(root)]
            if not whole:
                self.problems.append(f"no whole checkpoint beside latest={named.name}")
            self.newest = max([self.newest, *whole])

    def judge(self, kill: str) -> None:
        """While nobody writes: all that is named like a checkpoint is whole to the last byte, and none was lost."""
        whole, damaged = checkpoint_store.survey(self.run_dir / "checkpoints")
        self.problems += [f"{kill}: {found}" for found in damaged]
        for checkpoint in whole:
            self.problems += [f"{kill}: {reason}" for reason in checkpoint_integrity.verify(checkpoint.path).reasons]
        newest = whole[-1].step if whole else 0
        if newest < self.newest:
            self.problems.append(f"{kill}: step {self.newest} was committed and is lost; the newest is {newest}")
        self.newest = newest


def kill_once(watch: Watch, numbers: random.Random, *overrides: str) -> str:
    """One attempt that is killed; returns what was killed when, or "" if it came to its end before."""
    attempt = len(list((watch.run_dir / "attempts").glob("*"))) + 1
    command = commands.start(watch.run_dir, *overrides)
    at_start, num_steps = numbers.random() < 0.2, numbers.randint(1, MOMENTS_STEPS)
    due = time.monotonic() + numbers.uniform(0, START_SECONDS) if at_start else None
    while due is None or time.monotonic() < due:
        if command.process.poll() is not None:
            assert command.wait().code == 0, command.wait().out
            return ""
        watch.look()
        if due is None and sum(row["attempt"] == attempt for row in commands.rows(watch.run_dir)) >= num_steps:
            due = time.monotonic() + numbers.uniform(0, MOMENTS_SECONDS)
        time.sleep(0.01)
    pids = sorted(command.processes())
    victim = command.process.pid if numbers.random() < 0.5 or not pids else numbers.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while command.process.poll() is None and time.monotonic() < deadline:
        watch.look()
        time.sleep(0.01)
    if command.process.poll() is None:  # a guardian was hit, which nobody misses
        command.kill()
    command.wait()
    assert command.left() == []
    steps = commands.steps(watch.run_dir)
    return f"{'launcher' if victim == command.process.pid else 'a process below'} at step {steps[-1] if steps else 0}"


def test_a_run_killed_at_random_moments_loses_nothing_and_ends_bit_equal(
    run_ranks: RunRanks, tmp_path: Path, cache: str
) -> None:
    print(f"TORTURE_SEED={SEED}")
    numbers, watch, kills = random.Random(SEED), Watch(tmp_path / "tortured"), []
    whole = commands.start(tmp_path / "whole", *OVERRIDES, cache, "checkpoint.save_interval=0").wait(WHOLE_SECONDS)
    assert whole.code == 0, whole.out
    for _ in range(NUM_KILLS):
        first = () if (watch.run_dir / "config.yaml").exists() else (*OVERRIDES, cache)
        kill = kill_once(watch, numbers, *first)
        watch.judge(kill)
        kills.append(kill)
        print(f"kill {len(kills)}: {kill or 'it came to its end before'}; newest checkpoint {watch.newest}", flush=True)
    ended = commands.start(watch.run_dir).wait(WHOLE_SECONDS)
    watch.judge("at the end")
    assert ended.code == 0, ended.out
    assert watch.problems == []
    assert commands.trajectory(watch.run_dir) == commands.trajectory(tmp_path / "whole")
    folders = [
        max(checkpoint_store.committed(run / "checkpoints"), key=lambda one: one.step)
        for run in (watch.run_dir, tmp_path / "whole")
    ]
    assert run_ranks(differing_tensors, 1, folders[0].path, folders[1].path) == [[]]


def differing_tensors(rank: int, world: int, store: str, one: Path, other: Path) -> list[str]:
    """Names of tensors, of weights and optimizer, that are not equal bit for bit."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    first, second = full_tensors(one), full_tensors(other)
    assert first.keys() == second.keys() and len(first) > 10
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
