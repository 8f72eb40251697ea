"""Rows of JSON, one a line: how they are written whole, read while somebody writes, and repaired after a kill.

`events.jsonl` tells a run's story, a row an event: `{time, attempt, rank, kind, step, data}`. Every rank may write: a
row is one `write` to a file opened with O_APPEND, so that rows of several processes do not mix. A process killed inside
a write leaves a torn last line; `drop_torn_line` removes it before the next attempt appends, and readers skip what is
not JSON.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class JsonLines:
    """Appends rows to a file, each by one write; the file is opened by the first, since it may be replaced before."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1

    def append(self, row: Row) -> None:
        """Write one row; numbers that JSON does not know (nan, inf) become null."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            text = json.dumps(row, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(row))
        os.write(self._fd, text.encode() + b"\n")


class EventLog:
    """Writes events of one process of one attempt.

    Args:
        path: `events.jsonl` of the run.
        attempt: number of the attempt.
        rank: global rank; None for the launcher.
        listener: also gets every row, for a display in the same process.
    """

    def __init__(
        self, path: Path, *, attempt: int, rank: int | None, listener: Callable[[Row], None] | None = None
    ) -> None:
        self._lines, self._attempt, self._rank, self._listener = JsonLines(path), attempt, rank, listener

    def write(self, kind: str, step: int | None = None, **data: Any) -> None:
        """Append one event; `data` holds plain JSON values."""
        row = {"time": now(), "attempt": self._attempt, "rank": self._rank, "kind": kind, "step": step, "data": data}
        self._lines.append(row)
        if self._listener is not None:
            self._listener(row)


class Follower:
    """Reads the rows of one attempt while other processes append them; survives that the file is replaced.

    Args:
        path: file of rows that carry their `attempt`; it may not exist yet.
        attempt: rows of other attempts are passed over.
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._inode, self._offset = 0, 0
        if path.exists():  # whatever is there is of earlier attempts
            stat = path.stat()
            self._inode, self._offset = stat.st_ino, stat.st_size

    def poll(self) -> list[Row]:
        """Complete rows since the last call."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode:
                    self._inode, self._offset = stat.st_ino, 0
                self._offset = min(self._offset, stat.st_size)  # rows were taken back
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for row in _parse(whole) if row.get("attempt") == self._attempt]


class Story:
    """Follows the events and the metrics of one attempt and puts them into the order in which they were written.

    The files are read one after the other, so a row may appear between two reads. Whatever was written before a row
    that is given out has been given out before it.
    """

    def __init__(self, events: Path, metrics: Path, *, attempt: int) -> None:
        self._events, self._metrics = Follower(events, attempt=attempt), Follower(metrics, attempt=attempt)
        self._held: list[Row] = []

    def poll(self) -> list[Row]:
        """Rows since the last call; those with a `kind` are events. Call twice to be sure of the last one."""
        events = self._held + self._events.poll()
        metrics = self._metrics.poll()
        late = self._events.poll()  # some of these may come after metrics that were not there yet
        newest = metrics[-1]["time"] if metrics else ""
        self._held = [row for row in late if row["time"] > newest]
        rows = [*metrics, *events, *(row for row in late if row["time"] <= newest)]
        return sorted(rows, key=lambda row: row["time"])  # stable: a step comes before what follows from it


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file."""
    return list(_parse(path.read_bytes())) if path.exists() else []


def drop_torn_line(path: Path) -> None:
    """Cut what follows the last newline; only the run's one writer may call it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def now() -> str:
    """UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parse(content: bytes) -> Iterator[Row]:
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
