"""`shardwright bench step` as a user runs it."""

import json
import sys
from pathlib import Path

import pytest

from . import commands

BENCH = (sys.executable, "-P", "-m", "shardwright.pretrain", "bench", "step")
STEPS = ("--steps=3", "--warmup=1")
LOSS_TOLERANCE = 1e-6
"""Relative; only the order of fp32 sums differs."""


@pytest.mark.slow  # four starts of two ranks
def test_ours_and_the_bare_loop_are_measured_over_the_same_work(tmp_path: Path) -> None:
    command = (*BENCH, "experiment=bench_quickstart", *STEPS, "--against=bare", "--json")
    (tmp_path / "here").mkdir()
    running = commands.Command(command, tmp_path / "here" / "out", {"TMPDIR": str(tmp_path)})
    ended = running.wait()
    assert ended.code == 0, ended.out
    found = json.loads(ended.out[ended.out.index("{\n") : ended.out.rindex("}") + 1])
    assert [each["loop"] for each in found["measurements"]] == ["ours", "bare", "bare", "ours"]
    for each in found["measurements"]:
        assert len(each["step_seconds"]) == 3 and len(each["warmup_seconds"]) == 1 and len(each["losses"]) == 4
        assert each["p10_seconds"] <= each["median_seconds"] <= each["p90_seconds"]
        assert each["tokens_per_second"] == 1024 / each["median_seconds"]
        assert each["memory"]["resident_bytes"] > 100e6
        assert (each["mfu"], each["gpus"]) == (None, None)
        assert len(set(each["losses"])) == 4, "every step has other tokens"
    assert found["ratio"]["overall"] > 0
    assert found["ratio"]["loss_difference"] < LOSS_TOLERANCE
    assert [path.name for path in tmp_path.iterdir()] == ["here"], "the folder of the measurement is gone"
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["out"], "nothing of the user's was touched"
    assert running.left() == []


@pytest.mark.slow  # rounds of real checkpoints
def test_saving_is_measured_in_parts_beside_what_the_machine_does_with_the_same_bytes(tmp_path: Path) -> None:
    command = (*BENCH[:-1], "checkpoint", "experiment=bench_quickstart", "--steps=2", "--json")
    ended = commands.Command(command, tmp_path / "out", {}).wait()
    assert ended.code == 0, ended.out
    found = json.loads(ended.out[ended.out.index("{\n") : ended.out.rindex("}") + 1])
    assert len(found["rounds"]) == 2
    for measured in (*found["rounds"], found["median"]):
        assert measured["bytes"] > measured["bytes_of_a_rank"] > measured["bytes"] / 3, "two ranks share the work"
        assert all(value > 0 for name, value in measured.items() if name.endswith("_seconds"))
    median = found["median"]
    assert median["write / plain write"] == median["plain_write_seconds"] / median["write_seconds"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "its checkpoints are gone"
