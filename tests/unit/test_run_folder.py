"""A run's folder: private, one writer, numbered attempts, every step once."""

import json
import re
import signal
import stat
from pathlib import Path

import pytest

from shardwright.conf.problems import RefusedError
from shardwright.pretrain.events import EventLog, Follower, Story, read_rows
from shardwright.pretrain.faults import Failure, TrainingFault, culprit, judge
from shardwright.pretrain.folder import Attempt, RunFolder
from shardwright.pretrain.metrics import COLUMNS, MetricsLog

TOLD = {"device": "cpu", "load": []}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write_steps(folder: RunFolder, attempt: Attempt, first: int, last: int) -> None:
    log = MetricsLog(folder.metrics, attempt=attempt.number)
    for step in range(first, last + 1):
        log.append({"step": step, "loss": 1 / step})


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_the_folder_is_its_owner_s_alone(folder: RunFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["thesis.tex", ".bashrc"])
def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("years of work")
    mode = tmp_path.stat().st_mode
    with pytest.raises(RefusedError, match=re.escape(name)):
        RunFolder(tmp_path).create()
    assert tmp_path.stat().st_mode == mode


def test_a_folder_whose_first_start_was_killed_is_taken_again(tmp_path: Path) -> None:
    for name in ("lock", "lock.json", ".lock.json.17", "overrides.txt", ".config.yaml.17"):
        (tmp_path / name).write_text("")
    RunFolder(tmp_path).create()


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match=r"run\.dir"):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_second_writer_is_refused_naming_the_first(folder: RunFolder) -> None:
    with folder.lock():
        attempt = folder.new_attempt("a: 1\n", TOLD)
        with pytest.raises(RefusedError, match=rf"pid \d+ on .* since .*, attempt {attempt.number}"), folder.lock(0.2):
            pass
    with folder.lock(0) as lock:
        assert not lock.waited


def test_attempts_are_numbered_and_have_ids_of_their_own(folder: RunFolder) -> None:
    first, second = folder.new_attempt("a: 1\n", TOLD), folder.new_attempt("a: 2\n", TOLD)
    assert (first.number, second.number) == (1, 2)
    assert first.id != second.id
    assert Attempt.at(second.path) == second
    assert second.config.read_text() == "a: 2\n"
    assert second.launch["device"] == "cpu"


def test_other_ranks_find_the_attempt_of_their_launch_while_rank_0_lives(folder: RunFolder) -> None:
    assert folder.running_attempt("job 1") is None
    with folder.lock():
        attempt = folder.new_attempt("", {**TOLD, "launch_id": "job 1"})
        assert folder.running_attempt("job 1") == attempt
        assert folder.running_attempt("job 2") is None
    assert folder.running_attempt("job 1") is None


def test_after_a_crash_every_step_stands_once_and_lost_work_is_kept_aside(folder: RunFolder) -> None:
    first = folder.new_attempt("", TOLD)
    write_steps(folder, first, 1, 23)
    kept = folder.metrics.read_bytes().splitlines()[:20]
    second = folder.new_attempt("", TOLD)
    assert folder.cut_metrics(20, second) == 3
    write_steps(folder, second, 21, 30)
    assert steps(folder.metrics) == list(range(1, 31))
    assert folder.metrics.read_bytes().splitlines()[:20] == kept
    assert steps(second.path / "removed_metrics.jsonl") == [21, 22, 23]
    assert [row["attempt"] for row in read_rows(folder.metrics)] == [1] * 20 + [2] * 10


def test_a_torn_last_line_is_dropped(folder: RunFolder) -> None:
    attempt = folder.new_attempt("", TOLD)
    write_steps(folder, attempt, 1, 2)
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    folder.cut_metrics(2, attempt)
    write_steps(folder, attempt, 3, 3)
    assert steps(folder.metrics) == [1, 2, 3]
    assert folder.metrics.read_bytes().count(b"\n") == 3


def test_a_row_has_every_column_and_null_where_nothing_is_known(folder: RunFolder) -> None:
    write_steps(folder, folder.new_attempt("", TOLD), 1, 1)
    (row,) = read_rows(folder.metrics)
    assert set(COLUMNS) < set(row)
    assert row["mfu"] is None


def test_rows_are_json_also_where_a_loss_is_not_a_number(folder: RunFolder) -> None:
    log = MetricsLog(folder.metrics, attempt=1)
    log.append({"step": 1, "loss": float("nan")})
    (line,) = folder.metrics.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None


def test_a_torn_event_does_not_swallow_the_next_attempt_s_first(folder: RunFolder) -> None:
    folder.events.write_text('{"time": "torn')
    attempt = folder.new_attempt("", TOLD)
    EventLog(folder.events, attempt=attempt.number, rank=0).write("phase", phase="model")
    (row,) = read_rows(folder.events)
    assert (row["kind"], row["step"], row["data"], row["attempt"]) == ("phase", None, {"phase": "model"}, 1)


def test_a_follower_sees_this_attempt_s_rows_once_also_when_the_file_is_replaced(folder: RunFolder) -> None:
    write_steps(folder, folder.new_attempt("", TOLD), 1, 3)
    attempt = folder.new_attempt("", TOLD)
    follower = Follower(folder.metrics, attempt=attempt.number)
    assert follower.poll() == []
    folder.cut_metrics(2, attempt)
    write_steps(folder, attempt, 3, 4)
    assert [row["step"] for row in follower.poll()] == [3, 4]
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 5, ')
        file.flush()
        assert follower.poll() == []
        file.write(b'"attempt": 2}\n')
    assert [row["step"] for row in follower.poll()] == [5]


def test_a_story_tells_events_and_steps_in_the_order_in_which_they_happened(folder: RunFolder) -> None:
    story = Story(folder.events, folder.metrics, attempt=1)
    events, metrics = EventLog(folder.events, attempt=1, rank=0), MetricsLog(folder.metrics, attempt=1)
    events.write("start")
    metrics.append({"step": 1})
    events.write("eval", 1)
    metrics.append({"step": 2})
    events.write("end", 2)
    told = [row.get("kind", row["step"]) for row in [*story.poll(), *story.poll()]]
    assert [row for row in told if isinstance(row, str)] == ["start", "eval", "end"]
    assert told.index(1) < told.index("eval") and told.index(2) < told.index("end")


def test_the_status_is_replaced_whole(folder: RunFolder) -> None:
    attempt = folder.new_attempt("", TOLD)
    assert folder.status() == {}
    folder.write_status("running", attempt)
    folder.write_status("done", attempt, exit_code=0, step=7)
    status = folder.status()
    assert (status["state"], status["exit_code"], status["step"], status["attempt"]) == ("done", 0, 7, 1)


def test_a_vanished_rank_is_to_blame_before_those_whose_connection_broke(tmp_path: Path) -> None:
    Failure.of(RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer"), rank=0, host="a").write(
        tmp_path
    )
    victim = judge(3, rank=0, errors=tmp_path, seen=1)
    vanished = judge(7, rank=1, errors=tmp_path, seen=2)
    assert victim and vanished
    assert culprit([victim, vanished]) is vanished
    assert vanished.exit_code == 3 and "exit code 7" in vanished.error


def test_a_rank_that_its_communication_library_aborted_is_not_to_blame(tmp_path: Path) -> None:
    aborted = judge(-signal.SIGABRT, rank=0, errors=tmp_path, seen=1)
    killed = judge(-signal.SIGKILL, rank=1, errors=tmp_path, seen=2)
    assert aborted and killed and culprit([aborted, killed]) is killed


def test_an_own_error_is_to_blame_before_an_earlier_broken_connection() -> None:
    victim = Failure.of(RuntimeError("NCCL error: remote process exited"), rank=0, host="a")
    own = Failure.of(TrainingFault("loss is nan at step 4"), rank=1, host="b")
    assert culprit([victim, own]) is own
    assert (own.exit_code, victim.exit_code) == (3, 3)


def test_errors_bring_their_exit_codes() -> None:
    assert Failure.of(RefusedError([]), rank=0, host="a").exit_code == 2
    assert Failure.of(KeyError("x"), rank=0, host="a").exit_code == 1
    assert Failure.of(ValueError("socket timed out waiting"), rank=0, host="a").exit_code == 1


@pytest.mark.parametrize(("returncode", "exit_code"), [(0, None), (75, None), (4, 4), (-9, 3), (-11, 3), (1, 3)])
def test_ends_without_a_word_are_judged_by_their_code(tmp_path: Path, returncode: int, exit_code: int | None) -> None:
    failure = judge(returncode, rank=0, errors=tmp_path, seen=0)
    assert (failure and failure.exit_code) == exit_code
