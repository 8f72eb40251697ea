"""Rows that are taken back while their writer goes on and somebody reads along."""

from pathlib import Path

from shardwright.pretrain import metrics
from shardwright.pretrain.events import Follower, JsonLines, read_rows


def row(step: int, loss: float) -> dict[str, float]:
    return {"step": step, "attempt": 1, "loss": loss}


def test_every_step_stands_once_and_a_reader_sees_what_was_added_since(tmp_path: Path) -> None:
    path, removed = tmp_path / "metrics.jsonl", tmp_path / "removed.jsonl"
    lines, reader = JsonLines(path), Follower(path, attempt=1)
    for step in range(1, 6):
        lines.append(row(step, 2.0))
    assert [seen["step"] for seen in reader.poll()] == [1, 2, 3, 4, 5]
    metrics.take_back(path, 3, removed=removed)
    assert reader.poll() == []  # a reader looks more often than steps are made
    lines.append(row(4, 1.0))
    assert [(seen["step"], seen["loss"]) for seen in reader.poll()] == [(4, 1.0)]
    assert [(seen["step"], seen["loss"]) for seen in read_rows(path)] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0)]
    assert [seen["step"] for seen in read_rows(removed)] == [4, 5]


def test_nothing_is_taken_back_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    metrics.take_back(tmp_path / "fp8.jsonl", 3, removed=tmp_path / "removed.jsonl")
    assert list(tmp_path.iterdir()) == []
