"""Checkpoints on disk: whole or not there, whatever was killed when; what is asked for and missing is refused."""

import hashlib
import pwd
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import checkpoint_choice, trust
from shardwright.pretrain import checkpoint_store as store


def write(root: Path, step: int) -> store.Committed:
    temporary = store.begin(root, step)
    (temporary / "shard").write_bytes(b"x" * step)
    return store.commit(temporary, {"step": step}, {"shard": (step, store.sha256(temporary / "shard"))})


def find(root: Path, *overrides: str) -> store.Committed | None:
    return checkpoint_choice.find(compose(overrides).checkpoint, root).load


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


# ---- damaged ones ----------------------------------------------------------------------------------------------------


def choose(root: Path, *overrides: str) -> checkpoint_choice.Choice:
    return checkpoint_choice.find(compose(overrides).checkpoint, root)


def test_the_newest_whole_one_is_taken_and_the_damaged_one_before_it_is_told(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    (tmp_path / "step_00000030" / "shard").unlink()
    choice = choose(tmp_path)
    assert choice.load is not None and choice.load.step == 20
    assert [checkpoint.step for checkpoint in choice.fallbacks] == [10]
    assert [str(found) for found in choice.damaged] == ["step_00000030 (shard is missing)"]


def test_fallback_stop_does_not_start_from_an_older_one(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20).path / "shard").unlink()
    with pytest.raises(RefusedError, match=r"checkpoint.fallback=stop: .*step_00000020 \(shard is missing\).* step 10"):
        find(tmp_path, "checkpoint.fallback=stop")
    write(tmp_path, 30)
    choice = choose(tmp_path, "checkpoint.fallback=stop")
    assert choice.load is not None and (choice.load.step, choice.fallbacks) == (30, ())


def test_a_step_that_was_asked_for_has_no_fallback(tmp_path: Path) -> None:
    write(tmp_path, 10), write(tmp_path, 20)
    assert choose(tmp_path, "checkpoint.load_step=20").fallbacks == ()


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    (write(tmp_path, 10).path / "shard").unlink()
    with pytest.raises(RefusedError, match=r"no whole checkpoint.*step_00000010 \(shard is missing\).*move them"):
        find(tmp_path)


@pytest.mark.parametrize("said", ["step_00000099", "step_00000010", "", "\0"])
def test_the_pointer_latest_is_a_hint_that_nothing_reads(tmp_path: Path, said: str) -> None:
    write(tmp_path, 10), write(tmp_path, 20)
    (tmp_path / "latest").write_text(said)
    found = find(tmp_path)
    assert found is not None and found.step == 20


def test_damaged_ones_are_put_aside_with_the_later_steps(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20).path / "shard").unlink()
    store.supersede(tmp_path, 10, attempt=2)
    assert sorted(path.name for path in tmp_path.glob("*step_*")) == [
        "step_00000010",
        "superseded_by_attempt_002_step_00000020",
    ]


# ---- which stay ------------------------------------------------------------------------------------------------------


def saved(root: Path, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        temporary = store.begin(root, step)
        store.commit(temporary, {"step": step, "validation_loss": loss}, {})


def test_every_nth_step_and_the_best_stay_beside_the_last(tmp_path: Path) -> None:
    saved(tmp_path, {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: None, 60: 1.5, 70: None})
    store.retain(tmp_path, 1, keep_every=30, keep_best=2)
    assert steps(tmp_path) == [20, 30, 60, 70]


def test_of_two_equally_good_ones_the_earlier_stays(tmp_path: Path) -> None:
    saved(tmp_path, {10: 1.0, 20: 1.0, 30: 2.0})
    store.retain(tmp_path, 1, keep_best=1)
    assert steps(tmp_path) == [10, 30]


def test_one_always_stays_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    saved(tmp_path, {10: None, 20: None, 30: None})
    (tmp_path / "step_00000030" / store.TRAINER).unlink()
    store.retain(tmp_path, 1)
    assert steps(tmp_path) == [20]


def test_those_of_the_last_hours_stay_by_the_time_that_they_were_written_at(tmp_path: Path) -> None:
    for step, hours in {10: 30, 20: 5, 30: 1, 40: 0}.items():
        time = datetime.now(UTC) - timedelta(hours=hours)
        store.commit(store.begin(tmp_path, step), {"step": step, "time": time.isoformat()}, {})
    store.retain(tmp_path, 1, keep_hours=6)
    assert steps(tmp_path) == [20, 30, 40]


# ---- written by other machines ---------------------------------------------------------------------------------------


def test_a_file_that_another_machine_wrote_and_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    temporary, content = store.begin(tmp_path, 10), b"x" * 10

    def appear() -> None:
        for part in (content[:4], content):
            time.sleep(0.15)
            (temporary / "shard").write_bytes(part)

    late = threading.Thread(target=appear)
    late.start()
    written = {"shard": (len(content), hashlib.sha256(content).hexdigest())}
    done = store.commit(temporary, {"step": 10}, written)
    late.join()
    assert store.manifest(done.path)["shard"]["bytes"] == 10
    assert store.damage(done.path) is None


def test_without_a_file_that_was_written_nothing_is_committed(tmp_path: Path) -> None:
    temporary = store.begin(tmp_path, 10)
    with pytest.raises(OSError, match=r"shard was written.*10 bytes are not to be seen"):
        store.commit(temporary, {"step": 10}, {"shard": (10, "0" * 64)}, seen_seconds=0.2)
    assert steps(tmp_path) == []


# ---- written by others -----------------------------------------------------------------------------------------------


def test_what_everybody_may_change_is_foreign_and_needs_trust(tmp_path: Path) -> None:
    path = write(tmp_path / "other" / "checkpoints", 10).path
    load = f"checkpoint.load={tmp_path}/other"
    assert find(tmp_path / "new", load) is not None
    (path / "shard").chmod(0o666)
    with pytest.raises(RefusedError, match=r"10 there is foreign: shard may be changed by everybody.*trusted=true"):
        find(tmp_path / "new", load)
    assert find(tmp_path / "new", load, "checkpoint.trusted=true") is not None


def test_what_belongs_to_another_user_is_foreign_and_the_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "other" / "checkpoints", 10).path
    owner = path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    monkeypatch.setattr(trust, "_ROOT", -1)
    with pytest.raises(RefusedError, match=rf"its folder belongs to the user {pwd.getpwuid(owner).pw_name}"):
        find(tmp_path / "new", f"checkpoint.load={tmp_path}/other")


def test_a_run_is_not_asked_about_its_own_checkpoints(tmp_path: Path) -> None:
    (write(tmp_path, 10).path / "shard").chmod(0o666)
    assert find(tmp_path) is not None
