"""A disk that is full or read-only when a checkpoint is due: one clear error on all ranks, and nothing old is touched.

The disks are file systems in memory, which root alone may mount.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwright.pretrain import checkpoint_integrity, checkpoint_store

from . import commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk takes root"),
]
ROOM = 0.5
"""Of a checkpoint, beside those that are there."""

Disk = Callable[..., Path]


@pytest.fixture
def run_on_a_disk(finished_run: Path, tmp_path: Path) -> Iterator[Disk]:
    """A function that puts a copy of the finished run's checkpoints on a disk of their own."""
    run_dir = tmp_path / "run"
    root = run_dir / "checkpoints"

    def make(*, read_only: bool = False) -> Path:
        shutil.copytree(finished_run, run_dir)
        whole = checkpoint_store.committed(root)
        size = int(sum(one.num_bytes for one in whole) + ROOM * whole[-1].num_bytes)
        shutil.move(root, tmp_path / "aside")
        root.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", root], check=True)
        shutil.copytree(tmp_path / "aside", root, dirs_exist_ok=True)
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        return run_dir

    yield make
    if os.path.ismount(root):
        subprocess.run(["umount", root], check=True)


def is_refused_and_nothing_lost(run_dir: Path, ended: commands.Ended, *words: str) -> None:
    assert ended.code == 3, ended.out
    said = ("could not be written: rank", "whole ones in", ": 6, 12", "are free there", *words)
    assert [word for word in said if word not in ended.out] == []
    assert "Traceback" not in ended.out
    for rank in (0, 1):
        failure = json.loads((run_dir / "attempts" / "002" / "errors" / f"rank_{rank:05d}.json").read_text())
        assert "could not be written" in failure["error"]
    for step in (6, 12):
        path = checkpoint_store.step_folder(run_dir / "checkpoints", step)
        assert checkpoint_integrity.verify(path).reasons == ()


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_ends_the_run_at_the_next_step_with_a_clear_error(run_on_a_disk: Disk, asynchronous: str) -> None:
    run_dir = run_on_a_disk()
    save = ("checkpoint.save_interval=14", f"checkpoint.async_save={asynchronous}")
    ended = commands.train(run_dir, "schedule.train_iters=1000", *save)
    is_refused_and_nothing_lost(run_dir, ended, "No space left on device", "step 14")
    assert commands.steps(run_dir)[-1] < 28, "it ended before the next save"


def test_a_read_only_disk_ends_the_run_with_a_clear_error(run_on_a_disk: Disk) -> None:
    run_dir = run_on_a_disk(read_only=True)
    ended = commands.train(run_dir, "schedule.train_iters=14")
    is_refused_and_nothing_lost(run_dir, ended, "Read-only file system", "step 14")
