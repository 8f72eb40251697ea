"""`metrics.jsonl`: one row an optimizer step, every step once, also over kills and resumes.

Rank 0 appends. A run that resumes from step S first cuts the file to S (`cut`): rows of later steps came from work that
is lost, they move to the attempt's folder, and the steps are written again.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

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


def cut(path: Path, step: int, *, removed: Path) -> int:
    """Keep the rows up to `step`, byte for byte; drop a torn or unreadable line.

    Args:
        path: `metrics.jsonl`; replaced atomically, and left alone where nothing is to be cut.
        step: the step that the run continues from.
        removed: file that the rows of later steps are appended to.

    Returns:
        The number of rows that were moved away.
    """
    if not path.exists():
        return 0
    kept: dict[int, bytes] = {}
    later: list[bytes] = []
    content = path.read_bytes()
    for line in content.splitlines(keepends=True):
        try:
            at = json.loads(line)["step"] if line.endswith(b"\n") else None
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(at, int):
            if at > step:
                later.append(line)
            else:
                kept[at] = line
    rest = b"".join(kept.values())
    if rest == content:
        return 0
    _write_synced(removed, later, "ab")
    part = path.with_name(path.name + ".part")
    _write_synced(part, [rest], "wb")
    part.replace(path)
    return len(later)


def _write_synced(path: Path, lines: list[bytes], mode: str) -> None:
    with path.open(mode) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
