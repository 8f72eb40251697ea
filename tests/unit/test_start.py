"""What a start means: a new run, one that goes on, one that is changed, one that is finished."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import checkpoint_store, provenance
from shardwright.pretrain.folder import RunFolder
from shardwright.pretrain.start import Start, begin, merge_overrides, resolve
from shardwright.pretrain.train import train

TYPED = ["data=mock", "cluster.gpu=none", "parallel.overlap_param_gather=true", "model.num_layers=2"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was started once."""
    folder = RunFolder(tmp_path / "run")
    start_once(folder, [*TYPED, f"run.dir={folder.path}"])
    return folder


def start_once(folder: RunFolder, overrides: Sequence[str]) -> Start:
    start = resolve(overrides, None)
    folder.create()
    with folder.lock():
        begin(start, overrides, {})
    return start


def test_a_first_start_freezes_the_configuration_and_what_was_typed(folder: RunFolder) -> None:
    assert compose.load(folder.config).model.num_layers == 2
    assert folder.saved_overrides() == [*TYPED, f"run.dir={folder.path}"]


def test_run_dir_alone_goes_on_with_the_frozen_file(folder: RunFolder) -> None:
    start = resolve([f"run.dir={folder.path}"], None)
    assert start.config == compose.load(folder.config)
    assert start.differences == []


def test_a_run_s_folder_may_be_moved(folder: RunFolder, tmp_path: Path) -> None:
    moved = tmp_path / "it's moved"
    shutil.move(folder.path, moved)
    for more in ([], ["schedule.train_iters=77"]):
        start = resolve([f"run.dir='{str(moved).replace(chr(39), chr(92) + chr(39))}'", *more], None)
        assert start.config.run.dir == str(moved)
        assert start.config.model.num_layers == 2


def test_an_override_changes_its_key_and_leaves_what_was_typed_before(folder: RunFolder) -> None:
    frozen = folder.config.read_bytes()
    start = start_once(folder, [f"run.dir={folder.path}", "schedule.train_iters=77", "optimizer.lr=0.5"])
    assert {d.key: d.present for d in start.differences} == {"schedule.train_iters": 77, "optimizer.lr": 0.5}
    assert start.config.model.num_layers == 2
    assert folder.config.read_bytes() == frozen
    assert compose.load(folder.attempts / "002" / "config.yaml").schedule.train_iters == 77
    assert compose.load(folder.attempts / "001" / "config.yaml").schedule.train_iters != 77


def test_the_same_command_again_is_no_difference(folder: RunFolder) -> None:
    assert resolve([*TYPED, f"run.dir={folder.path}"], None).differences == []


def test_changes_that_a_run_cannot_take_are_refused_all_of_them(folder: RunFolder) -> None:
    with pytest.raises(RefusedError) as caught:
        resolve([f"run.dir={folder.path}", "model.num_layers=4", "run.seed=5", "optimizer.lr=0.5"], None)
    assert [problem.key for problem in caught.value.problems] == ["run.seed", "model.num_layers"]
    assert "model.num_layers=2 continues it" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "new", "merged"),
    [
        (["a=1", "b=2"], ["a=3"], ["b=2", "a=3"]),
        (["model=tiny"], ["model=llama", "+c=1"], ["model=llama", "+c=1"]),
        (["++c=1"], ["c=2"], ["c=2"]),
    ],
)
def test_new_overrides_replace_saved_ones_of_the_same_key(saved: list[str], new: list[str], merged: list[str]) -> None:
    assert merge_overrides(saved, new) == merged


def test_a_finished_run_is_said_to_be_finished(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    iters = compose.load(folder.config).schedule.train_iters
    temporary = checkpoint_store.begin(folder.checkpoints, iters)
    checkpoint_store.commit(temporary, {"step": iters}, {}, config=folder.config.read_text())
    (folder.path / "status.json").write_text('{"state": "done"}')
    assert train([f"run.dir={folder.path}"]) == 0
    assert "finished" in capsys.readouterr().out
    assert not resolve([f"run.dir={folder.path}", f"schedule.train_iters={iters + 1}"], None).finished
    (folder.path / "status.json").write_text('{"state": "failed"}')
    assert not resolve([f"run.dir={folder.path}"], None).finished


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train([*TYPED, f"run.dir={tmp_path / 'new'}"], dry_run=True) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_launcher_s_environment_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RefusedError, match=r"WORLD_SIZE, .*MASTER_PORT=\(missing\): RANK=0 is set"):
        train([*TYPED, f"run.dir={tmp_path / 'new'}"])
    assert list(tmp_path.iterdir()) == []


def test_the_git_state_is_recorded_where_git_tracks_the_code_and_only_there(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("x = 1\n")
    assert provenance.git_state(code) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = provenance.git_state(code)
    code.write_text("x = 2\n")
    changed = provenance.git_state(code)
    assert clean and changed
    assert not clean["dirty"] and changed["dirty"] and "+x = 2" in changed["diff"]
    assert clean["sha"] == changed["sha"] and len(clean["sha"]) == 40
    (tmp_path / "untracked.py").write_text("")
    assert provenance.git_state(tmp_path / "untracked.py") is None
