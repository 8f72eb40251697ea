"""`metrics.jsonl`: one row an optimizer step, every step once, also over kills and resumes.

Rank 0 appends. A run that resumes from step S first cuts the file to S (`cut`): rows of later steps came from work that
is lost, they move to the attempt's folder, and the steps are written again.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.pretrain.events import JsonLines, Row, now

COLUMNS = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "loss_scale",
    "tokens",
    "tokens_per_second",
    "tflops",
    "mfu",
    "memory_bytes",
)
"""What every row has; null where a value is not known, never 0."""


class MetricsLog:
    """Appends the rows of one attempt; rank 0 alone has one.

    Args:
        path: `metrics.jsonl` of the run.
        attempt: number of the attempt.
        listener: also gets every row, for a display in the same process.
    """

    def __init__(self, path: Path, *, attempt: int, listener: Callable[[Row], None] | None = None) -> None:
        self._lines, self._attempt, self._listener = JsonLines(path), attempt, listener

    def append(self, row: Row) -> None:
        """Write one row, every column of `COLUMNS` present."""
        full = {**dict.fromkeys(COLUMNS), **row, "time": now(), "attempt": self._attempt}
        self._lines.append(full)
        if self._listener is not None:
            self._listener(full)


def cut(path: Path, step: int, *, removed: Path, identity: Sequence[str] = ("step",)) -> int:
    """Keep the rows up to `step`, byte for byte; drop a torn or unreadable line.

    Args:
        path: `metrics.jsonl`; replaced atomically, and left alone where nothing is to be cut.
        step: the step that the run continues from.
        removed: file that the rows of later steps are appended to.
        identity: columns that tell rows apart; of several rows with the same ones the last stays.

    Returns:
        The number of rows that were moved away.
    """
    if not path.exists():
        return 0
    kept: dict[tuple[Any, ...], bytes] = {}
    later: list[bytes] = []
    content = path.read_bytes()
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else {}
            at, key = row["step"], tuple(row[name] for name in identity)
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(at, int):
            if at > step:
                later.append(line)
            else:
                kept[key] = line
    rest = b"".join(kept.values())
    if rest == content:
        return 0
    _write_synced(removed, later, "ab")
    part = path.with_name(path.name + ".part")
    _write_synced(part, [rest], "wb")
    part.replace(path)
    return len(later)


def take_back(path: Path, step: int, *, removed: Path) -> None:
    """Cut the rows of later steps off the end of a file that its one writer goes on to append to.

    In place, unlike `cut`: the writer keeps it open. Its rows are in the order of their steps.

    Args:
        path: may not exist.
        step: the step that the run goes back to.
        removed: file that the rows are appended to.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = next((place for place, line in enumerate(lines) if json.loads(line)["step"] > step), len(lines))
    _write_synced(removed, lines[kept:], "ab")
    os.truncate(path, sum(map(len, lines[:kept])))


def _write_synced(path: Path, lines: list[bytes], mode: str) -> None:
    with path.open(mode) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
