"""`shardwright explain RUN`: the story of a run, from its folder alone.

Attempts, what each began with and how far it came, what was lost, what the time went into. *Lost* are steps that were
trained and trained again, since no checkpoint held them. *Goodput* is the share of all time between the first start and
the last end in which steps were trained that count; the rest is starting, saving, evaluating, lost steps and waiting.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import diagnosis, terminal
from shardwright.pretrain.diagnosis import Verdict
from shardwright.pretrain.events import Row, read_rows
from shardwright.pretrain.folder import RunFolder


@dataclass(slots=True)
class AttemptStory:
    """One attempt, as its rows tell it."""

    number: int
    first: str
    """Time of its first row."""
    last: str
    launcher: str = ""
    start_step: int | None = None
    last_step: int | None = None
    lost: int = 0
    """Steps of it that a later attempt trained again."""
    seconds: dict[str, float] = field(default_factory=dict)
    """starting, training, saving, evaluating."""
    end: str = "running, or it vanished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A run."""

    folder: RunFolder
    state: str
    attempts: list[AttemptStory]
    verdicts: list[Verdict]
    goodput: float | None
    """Seconds of steps that count / seconds from the first row to the last."""
    wall_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "folder": str(self.folder.path)}


def run(path: Path, *, as_json: bool = False) -> int:
    """Print the story of the run in `path`."""
    story = read(RunFolder(path))
    if as_json:
        print(json.dumps(story.as_json(), indent=1))
    else:
        show(story, terminal.console(110))
    return 0


def read(folder: RunFolder) -> Story:
    """The story of a run.

    Raises:
        RefusedError: there is no run.
    """
    if not folder.config.exists():
        rule = "no run lives there: it holds no config.yaml"
        raise RefusedError([Problem(key="RUN", value=folder.path, rule=rule)])
    events, metrics = read_rows(folder.events), read_rows(folder.metrics)
    removed = [row for path in sorted(folder.attempts.glob("*/removed_metrics.jsonl")) for row in read_rows(path)]
    attempts: dict[int, AttemptStory] = {}
    for row in sorted([*events, *metrics, *removed], key=lambda row: row["time"]):
        if row.get("kind") == "verdict":
            continue
        story = attempts.setdefault(row["attempt"], AttemptStory(row["attempt"], row["time"], row["time"]))
        story.last = row["time"]
        _add(story, row)
    for row in removed:
        attempts[row["attempt"]].lost += 1
    ended = diagnosis.verdicts(events)
    for verdict in ended:
        attempt = diagnosis.attempt_of(folder, verdict.launch)
        if attempt is not None and attempt.number in attempts and verdict.cause not in ("done", "stopped"):
            attempts[attempt.number].end = f"{verdict.cause}: {verdict.reason}"
    for number, story in attempts.items():
        launch = folder.attempts / f"{number:03d}" / "launch.json"
        if launch.exists():
            told = json.loads(launch.read_text())
            by_slurm = told.get("launcher") == "srun" or "slurm" in told.get("launch_id", "")
            story.launcher = told["launch_id"] if by_slurm else str(told.get("launcher", ""))
    stories = list(attempts.values())
    wall = _seconds(stories[0].first, max(story.last for story in stories)) if stories else 0.0
    useful = sum(row["step_seconds"] for row in metrics)
    return Story(
        folder=folder,
        state=str(folder.status().get("state", "not begun")),
        attempts=stories,
        verdicts=ended,
        goodput=useful / wall if wall and metrics else None,
        wall_seconds=wall,
    )


def show(story: Story, console: Console) -> None:
    """Print it for a person."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{story.folder.path}: {story.state}", title_justify="left")
    for name in ("attempt", "by", "began", "steps", "lost", "seconds", "ended"):
        table.add_column(name, overflow="fold", justify="right" if name in ("attempt", "lost") else "left")
    for attempt in story.attempts:
        reached = "-" if attempt.last_step is None else str(attempt.last_step)
        begin = "-" if attempt.start_step is None else str(attempt.start_step)
        table.add_row(
            str(attempt.number),
            attempt.launcher,
            attempt.first[:19],
            f"{begin} to {reached}",
            str(attempt.lost),
            ", ".join(f"{name} {seconds:.0f}" for name, seconds in attempt.seconds.items()),
            attempt.end,
        )
    console.print(table)
    if story.goodput is not None:
        lost = sum(attempt.lost for attempt in story.attempts)
        console.print(f"goodput {story.goodput:.0%} of {story.wall_seconds:.0f} s, {lost} steps trained twice")
    if story.verdicts and not story.verdicts[-1].requeue:
        last = story.verdicts[-1]
        console.print(f"stopped for good: {last.cause} ({last.reason})")


def _add(story: AttemptStory, row: Row) -> None:
    """Add one event or one step to the story of its attempt."""
    kind, data = row.get("kind"), row.get("data", {})
    if kind is None:
        story.last_step = max(row["step"], story.last_step or 0)
        _spend(story, "training", row["step_seconds"])
    elif kind == "start":
        story.start_step = row["step"]
        _spend(story, "starting", _seconds(story.first, row["time"]))
    elif kind == "checkpoint":
        _spend(story, "saving", data["stall_seconds"])  # the rest of its seconds is beside training
    elif kind == "fault":
        story.end = f"rank {data['rank']} on {data['host']}: {data['error']}"
    elif kind == "end" and data["state"] != "failed":
        story.end = str(data["state"])


def _spend(story: AttemptStory, on: str, seconds: float) -> None:
    story.seconds[on] = story.seconds.get(on, 0.0) + seconds


def _seconds(first: str, last: str) -> float:
    return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
