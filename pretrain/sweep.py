"""`train -m`: Hydra's sweep grammar, its points trained here one after another.

Hydra's own multirun would compose inside of one process that then trains; here every point is a `train` of its own with
its own exit code, folder and log, and all points are composed and checked before the first one starts. The folder of a
point depends only on its number and its overrides, so the same sweep started again continues where it was.
"""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from rich import box
from rich.table import Table

from shardwright.conf import compose
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.pretrain import checks, faults, guard, machine, ranks, terminal

LONGEST_NAME = 100
"""Characters of a point's folder name."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    index: int
    overrides: tuple[str, ...]
    """All overrides of this run."""
    swept: tuple[str, ...]
    """Those of them that differ between points."""

    @property
    def name(self) -> str:
        """Folder name: unique through the number, safe to type unquoted in a shell and in an override."""
        text = "__".join(override.lstrip("+").replace("=", "_", 1) for override in self.swept)
        return f"{self.index}_{re.sub(r'[^A-Za-z0-9_.-]+', '-', text)}"[:LONGEST_NAME].rstrip("_")


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Overrides of every point: the product of all sweeps, the last one varying fastest.

    Raises:
        RefusedError: an override cannot be read, or sweeps over an interval, which has no list of values.
    """
    return [list(point.overrides) for point in points_of(overrides)]


def run(overrides: Sequence[str], *, dry_run: bool = False) -> int:
    """Check every point, train them in turn, and print how each one ended.

    Returns:
        The first exit code that is not 0. A point that was told to stop ends the sweep, else the next one is trained.
    """
    refuse(_launcher_problems(os.environ))
    points, present = points_of(overrides), machine.detect()

    def rules(config: Config) -> list[Problem]:
        machine_problems = checks.machine_problems(config, present)
        return [*checks.config_problems(config), *machine_problems, *checks.own_ranks_problems(config)]

    folder, _ = check(points, rules)
    console = terminal.console(96)
    if dry_run:
        console.print(_summary(points, {}, {}, folder))
        return 0
    codes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for point in points:
        console.rule(f"{point.index + 1} of {len(points)}: {' '.join(point.swept)}", align="left", style="dim")
        begin = time.monotonic()
        own_folder = f"run.dir={compose.quoted(str(folder / point.name))}"
        codes[point.index], interrupted = _train([*point.overrides, own_folder])
        seconds[point.index] = time.monotonic() - begin
        if interrupted or codes[point.index] == faults.STOPPED:
            break
    console.print(_summary(points, codes, seconds, folder))
    return next((code for code in codes.values() if code), 0)


def points_of(overrides: Sequence[str]) -> list[Point]:
    """The points of a sweep; of two overrides of one key the later one counts, as in Hydra.

    Raises:
        RefusedError: an override cannot be read, or sweeps over an interval, which has no list of values.
    """
    choices: dict[str, tuple[list[str], bool]] = {}
    problems: list[Problem] = []
    with hydra.initialize_config_dir(config_dir=str(compose.CONFIG_FOLDER), version_base="1.3"):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())  # for glob(*)
        for text in overrides:
            key, _, value = text.partition("=")
            try:
                (override,) = parser.parse_overrides([text])
                choices.pop(override.get_key_element(), None)
                choices[override.get_key_element()] = (_values(override), override.is_sweep_override())
            except (HydraException, ValueError) as error:
                rule = f"cannot be swept ({str(error).splitlines()[0]})"
                problems.append(Problem(key=key, value=value, rule=rule, remedy="write key=a,b,c or key=range(0,3)"))
    refuse(problems)
    swept = [number for number, (_, is_sweep) in enumerate(choices.values()) if is_sweep]
    combinations = itertools.product(*(values for values, _ in choices.values()))
    return [
        Point(index, combination, tuple(combination[number] for number in swept))
        for index, combination in enumerate(combinations)
    ]


def _values(override: Override) -> list[str]:
    """One override per value."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise ValueError("an interval has no list of values")
    values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not values:
        raise ValueError("no value matches")
    return values


def check(points: Sequence[Point], rules: Callable[[Config], list[Problem]]) -> tuple[Path, list[Config]]:
    """Compose every point and judge it by `rules`; the sweep's folder, and the configurations of the points.

    Raises:
        RefusedError: what all points share once, the rest with the points that have it.
    """
    found: dict[Problem, list[Point]] = {}
    folders, configs = set(), []
    for point in points:
        try:
            config = compose.compose(point.overrides)
            folders.add(config.run.dir)
            configs.append(config)
            problems = rules(config)
        except RefusedError as error:
            problems = error.problems
        for problem in problems:
            found.setdefault(problem, []).append(point)
    problems = [_named(problem, guilty, points) for problem, guilty in found.items()]
    if len(folders) > 1:
        rule = "differs between the points, and each gets a folder of its own below that of the sweep"
        remedy = "give the sweep one: run.dir=FOLDER"
        problems.append(Problem(key="run.dir", value=", ".join(sorted(folders)), rule=rule, remedy=remedy))
    refuse(problems)
    return Path(f"{folders.pop()}_sweep"), configs


def _named(problem: Problem, guilty: Sequence[Point], points: Sequence[Point]) -> Problem:
    """The problem with the points that have it in front; of all points it is the sweep's own."""
    if len(guilty) == len(points):
        return problem
    more = f" and {len(guilty) - 1} more" if len(guilty) > 1 else ""
    return replace(problem, key=f"[{' '.join(guilty[0].swept)}{more}] {problem.key}")


def _train(overrides: Sequence[str]) -> tuple[int, bool]:
    """Run one point to its end; its exit code, and whether it was told to stop.

    Ctrl-C reaches the point by itself, being in the same process group: it is given the time to save. SIGTERM is passed
    on, and sent by the kernel if this process dies.
    """
    command = [sys.executable, "-m", "shardwright.pretrain", "train", *overrides]
    process = subprocess.Popen(command, preexec_fn=functools.partial(guard.die_with_parent, signal.SIGTERM))
    told: list[int] = []

    def stop(number: int, _frame: object) -> None:
        told.append(number)
        if number == signal.SIGTERM:
            process.send_signal(number)

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return (code if code >= 0 else 128 - code), bool(told)


def _launcher_problems(environ: Mapping[str, str]) -> list[Problem]:
    launched = ranks.detect(environ)
    if launched is None:
        return []
    rule = "-m starts one run after another by itself, and this process is one rank of many"
    remedy = "start `shardwright train -m` on one machine, outside of torchrun and srun"
    return [Problem(key="-m", value=launched.launcher, rule=rule, remedy=remedy)]


def _summary(points: Sequence[Point], codes: Mapping[int, int], seconds: Mapping[int, float], folder: Path) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"sweep of {len(points)} runs in {folder}", title_justify="left")
    for name in ("", "overrides", "folder", "exit", "seconds"):
        table.add_column(name, overflow="fold", justify="right" if name in ("exit", "seconds") else "left")
    for point in points:
        code, spent = codes.get(point.index), seconds.get(point.index)
        table.add_row(
            str(point.index),
            " ".join(point.swept),
            point.name,
            "-" if code is None else str(code),
            "-" if spent is None else f"{spent:.0f}",
        )
    return table
