"""Checkpoints on disk: whole or not there, whatever was killed when; what is asked for and missing is refused."""

from pathlib import Path

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import checkpoint_store as store


def write(root: Path, step: int) -> store.Committed:
    temporary = store.begin(root, step)
    (temporary / "shard").write_bytes(b"x" * step)
    return store.commit(temporary, {"step": step}, {"shard": store.sha256(temporary / "shard")})


def find(root: Path, *overrides: str) -> store.Committed | None:
    return store.find(compose(overrides).checkpoint, root)


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed(root)]


def test_a_committed_checkpoint_is_found_and_its_size_is_known(tmp_path: Path) -> None:
    done = write(tmp_path, 10)
    assert done.path.name == "step_00000010"
    assert steps(tmp_path) == [10]
    assert done.num_bytes > 10


def test_a_run_continues_from_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 20), write(tmp_path, 10)
    found = find(tmp_path)
    assert found is not None and found.step == 20


def test_what_a_kill_left_half_written_is_never_found_and_cleaned_away(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (store.begin(tmp_path, 20) / "shard").write_bytes(b"half")
    assert steps(tmp_path) == [10]
    assert [path.name for path in store.clean(tmp_path)] == [".writing_step_00000020"]
    assert steps(tmp_path) == [10]


@pytest.mark.parametrize("harm", ["shard missing", "shard shorter", "no marker", "manifest torn"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, harm: str) -> None:
    write(tmp_path, 10)
    path = write(tmp_path, 20).path
    match harm:
        case "shard missing":
            (path / "shard").unlink()
        case "shard shorter":
            (path / "shard").write_bytes(b"short")
        case "no marker":
            (path / store.MARKER).unlink()
        case "manifest torn":
            (path / store.MANIFEST).write_text('{"files": {')
    assert steps(tmp_path) == [10]
    with pytest.raises(RefusedError, match=r"step_00000020 \("):
        find(tmp_path, "checkpoint.load_step=20")


def test_a_damaged_checkpoint_of_the_same_step_gives_way_to_a_whole_one(tmp_path: Path) -> None:
    (write(tmp_path, 10).path / "shard").unlink()
    write(tmp_path, 10)
    assert steps(tmp_path) == [10]


def test_only_the_last_n_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    assert [path.name for path in store.retain(tmp_path, 2)] == ["step_00000010"]
    assert steps(tmp_path) == [20, 30]


def test_later_steps_are_put_aside_not_deleted_when_an_earlier_one_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, 10), write(tmp_path, 20)
    (aside,) = store.supersede(tmp_path, 10, attempt=3)
    assert steps(tmp_path) == [10]
    assert (aside / "shard").read_bytes() == b"x" * 20


def test_an_empty_folder_starts_at_step_0(tmp_path: Path) -> None:
    assert find(tmp_path / "new") is None


def test_resume_must_wants_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no whole checkpoint"):
        find(tmp_path, "checkpoint.resume=must")


def test_resume_never_wants_none(tmp_path: Path) -> None:
    write(tmp_path, 10)
    with pytest.raises(RefusedError, match=r"another run.dir"):
        find(tmp_path, "checkpoint.resume=never")


def test_a_load_path_that_does_not_exist_is_refused_and_says_what_does(tmp_path: Path) -> None:
    (tmp_path / "other_run").mkdir()
    with pytest.raises(RefusedError, match=r"checkpoint.load=.*nope.*other_run"):
        find(tmp_path / "new", f"checkpoint.load={tmp_path}/nope")


def test_a_step_that_does_not_exist_is_refused_and_lists_those_that_do(tmp_path: Path) -> None:
    write(tmp_path, 10), write(tmp_path, 20)
    with pytest.raises(RefusedError, match=r"load_step=999.*steps 10, 20"):
        find(tmp_path, "checkpoint.load_step=999")
    with pytest.raises(RefusedError, match=r"load_step=999.*no whole checkpoint"):
        find(tmp_path / "new", "checkpoint.load_step=999")


@pytest.mark.parametrize("where", ["run", "run/checkpoints", "run/checkpoints/step_00000010"])
def test_a_run_can_start_from_another_runs_folder_or_one_of_its_checkpoints(tmp_path: Path, where: str) -> None:
    write(tmp_path / "run" / "checkpoints", 10)
    found = find(tmp_path / "new", f"checkpoint.load={tmp_path}/{where}")
    assert found is not None and found.step == 10


def test_own_checkpoints_come_before_those_of_another_run(tmp_path: Path) -> None:
    write(tmp_path / "other" / "checkpoints", 50)
    write(tmp_path / "own", 10)
    found = find(tmp_path / "own", f"checkpoint.load={tmp_path}/other")
    assert found is not None and found.step == 10
