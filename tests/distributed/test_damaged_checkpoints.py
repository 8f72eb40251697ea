"""Two ranks meet a damaged checkpoint: both say so, and continue from the one before it or both end. Nobody hangs."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from shardwright.pretrain import checkpoint_integrity, checkpoint_store, cli

from . import commands

LIMIT_SECONDS = 60.0
"""Within this time all ranks have refused."""
GO_ON = "schedule.train_iters=14"


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, saved at 6 and 12, to be damaged."""
    return shutil.copytree(finished_run, tmp_path / "run")


def shards(run_dir: Path, step: int) -> list[Path]:
    return sorted(checkpoint_store.step_folder(run_dir / "checkpoints", step).glob("*.distcp"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def damaged(run_dir: Path) -> list[tuple[str, str]]:
    events = commands.events(run_dir, "checkpoint_damaged")
    return [(Path(event["data"]["path"]).name, event["data"]["reason"]) for event in events]


def test_a_flipped_bit_in_one_ranks_shard_gives_way_to_the_checkpoint_before(
    finished_run: Path, copied_run: Path
) -> None:
    broken = shards(copied_run, 12)[-1]
    flip(broken, broken.stat().st_size // 2)
    ended = commands.train(copied_run, GO_ON)
    assert ended.code == 0, ended.out
    ((name, reason),) = damaged(copied_run)
    assert name == "step_00000012" and broken.name in reason
    assert name in ended.out and broken.name in ended.out
    (resumed,) = commands.events(copied_run, "resume")
    assert resumed["step"] == 6
    (verified,) = commands.events(copied_run, "checkpoint_verified")
    assert verified["step"] == 6 and verified["data"]["bytes"] > 0 and verified["data"]["seconds"] > 0
    assert commands.trajectory(copied_run)[:12] == commands.trajectory(finished_run)
    assert "superseded_by_attempt_002_step_00000012" in commands.checkpoints(copied_run)


def test_a_truncated_shard_is_passed_over_before_a_rank_is_started(copied_run: Path) -> None:
    broken = shards(copied_run, 12)[0]
    os.truncate(broken, broken.stat().st_size // 2)
    ended = commands.train(copied_run, GO_ON)
    assert ended.code == 0, ended.out
    ((name, reason),) = damaged(copied_run)
    assert name == "step_00000012" and broken.name in reason and "the manifest says" in reason
    assert commands.events(copied_run, "resume")[0]["step"] == 6


@pytest.mark.parametrize("fallback", ["previous", "stop"])
def test_where_no_whole_one_is_left_all_ranks_end_with_4_and_nothing_changes(copied_run: Path, fallback: str) -> None:
    steps = {"previous": [6, 12], "stop": [12]}[fallback]
    for step in steps:
        flip(shards(copied_run, step)[step % 2], 1000)
    before, began = commands.trajectory(copied_run), time.monotonic()
    ended = commands.train(copied_run, GO_ON, f"checkpoint.fallback={fallback}")
    assert time.monotonic() - began < LIMIT_SECONDS
    assert ended.code == 4, ended.out
    assert all(f"step_{step:08d}" in ended.out for step in steps) and "Traceback" not in ended.out
    for rank in (0, 1):
        failure = json.loads((copied_run / "attempts" / "002" / "errors" / f"rank_{rank:05d}.json").read_text())
        assert failure["exit_code"] == 4 and ".distcp has other content" in failure["error"]
    assert commands.trajectory(copied_run) == before
    assert commands.checkpoints(copied_run) == ["latest", "step_00000006", "step_00000012"]


def test_a_missing_shard_of_the_only_checkpoint_is_refused_before_a_rank_is_started(copied_run: Path) -> None:
    shutil.rmtree(copied_run / "checkpoints" / "step_00000006")
    broken = shards(copied_run, 12)[0]
    broken.unlink()
    ended = commands.train(copied_run, GO_ON)
    assert ended.code == 2, ended.out
    assert f"{broken.name} is missing" in ended.out and "starting" not in ended.out


@pytest.mark.slow
def test_a_checkpoint_that_kills_who_loads_it_is_passed_over_after_the_second_time(
    copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = {"fault": "1:12:dies_loading"}
    for _ in range(2):
        ended = commands.train(copied_run, GO_ON, **dies)
        assert ended.code == 3 and "exit code 7" in ended.out, ended.out
    assert cli.main(["checkpoint", "list", str(copied_run)]) == 0
    assert "unloadable: it failed to load" in capsys.readouterr().out
    ended = commands.train(copied_run, GO_ON, **dies)
    assert ended.code == 0, ended.out
    ((name, reason),) = damaged(copied_run)
    assert name == "step_00000012" and "failed to load 2 times in a row, last in attempt 3" in reason
    assert name in ended.out and commands.events(copied_run, "resume")[-1]["step"] == 6
    assert commands.steps(copied_run) == list(range(1, 15))


def test_a_flip_of_any_sampled_byte_of_a_real_checkpoint_is_found(copied_run: Path) -> None:
    folder, numbers = checkpoint_store.step_folder(copied_run / "checkpoints", 12), random.Random(5)
    for name in checkpoint_store.files(folder):
        for position in numbers.sample(range((folder / name).stat().st_size), 10):
            flip(folder / name, position)
            assert any(name in reason for reason in checkpoint_integrity.verify(folder).reasons), (name, position)
            flip(folder / name, position)
    assert checkpoint_integrity.verify(folder).reasons == ()
