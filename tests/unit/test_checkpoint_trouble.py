"""A checkpoint that is whole and kills who loads it: two attempts in a row are its fault, later ones count."""

from pathlib import Path

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import checkpoint_choice, checkpoint_report
from shardwright.pretrain import checkpoint_store as store
from shardwright.pretrain.checkpoint_trouble import LOADING, unloadable
from shardwright.pretrain.events import EventLog
from shardwright.pretrain.faults import Failure

DIED = {"rank": 1, "host": "n2", "error": "killed by SIGSEGV", "exit_code": 3}
CHECKPOINT = compose([]).checkpoint


class Run:
    """A run's folder with checkpoints of the steps 10 and 20, whose attempts are played."""

    def __init__(self, path: Path) -> None:
        self.path, self.root, self.attempts = path, path / "checkpoints", 0
        for step in (10, 20):
            self.save(step)

    def save(self, step: int, log: EventLog | None = None) -> None:
        done = store.commit(store.begin(self.root, step), {"step": step}, {})
        if log:
            log.write("checkpoint", step, path=str(done.path))

    def attempt(self, *, loads: int, started: bool = False, fault: dict | None = None) -> EventLog:
        """An attempt that loads the checkpoint of a step."""
        self.attempts += 1
        log = EventLog(self.path / "events.jsonl", attempt=self.attempts, rank=0)
        log.write("checkpoint_verified", loads, path=str(store.step_folder(self.root, loads)))
        log.write("phase", phase=LOADING)
        if started:
            log.write("start", loads)
        if fault:
            log.write("fault", **fault)
        return log

    def chosen(self, *overrides: str) -> int:
        choice = checkpoint_choice.find(compose(overrides).checkpoint if overrides else CHECKPOINT, self.root)
        assert choice.load is not None
        return choice.load.step


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_after_two_attempts_that_died_over_it_the_one_before_is_taken_and_the_reason_told(run: Run) -> None:
    run.attempt(loads=20, fault=DIED)
    assert run.chosen() == 20, "once may be chance"
    run.attempt(loads=20, fault=DIED)
    choice = checkpoint_choice.find(CHECKPOINT, run.root)
    assert choice.load is not None and choice.load.step == 10
    (passed_over,) = choice.damaged
    assert str(passed_over) == (
        "step_00000020 (it failed to load 2 times in a row, last in attempt 2: killed by SIGSEGV)"
    )
    states = [(entry.step, entry.state) for entry in checkpoint_report.entries(run.path)]
    assert states == [(10, "whole"), (20, "unloadable")]
    with pytest.raises(RefusedError, match=r"checkpoint\.fallback=stop: .*failed to load"):
        run.chosen("checkpoint.fallback=stop")


def test_who_asks_for_it_by_its_step_gets_it(run: Run) -> None:
    for _ in range(2):
        run.attempt(loads=20, fault=DIED)
    assert run.chosen("checkpoint.load_step=20") == 20


def test_a_rank_that_told_it_in_its_error_file_alone_counts_too(run: Run) -> None:
    for number in (1, 2):
        run.attempt(loads=20)
        errors = run.path / "attempts" / f"{number:03d}" / "errors"
        errors.mkdir(parents=True)
        Failure(rank=1, host="n2", exit_code=1, error_type="ValueError", error="no", traceback=None, time=1.0).write(
            errors
        )
    assert "last in attempt 2: no" in unloadable(run.root)[store.step_folder(run.root, 20)]


def test_attempts_that_were_ended_from_outside_or_refused_or_failed_later_say_nothing(run: Run) -> None:
    for _ in range(3):
        run.attempt(loads=20)
        run.attempt(loads=20, fault=DIED | {"exit_code": 2})
        run.attempt(loads=20, started=True, fault=DIED)
    assert unloadable(run.root) == {}


def test_an_attempt_that_began_to_train_between_two_failures_clears_it(run: Run) -> None:
    run.attempt(loads=20, fault=DIED)
    run.attempt(loads=20, started=True)
    run.attempt(loads=20, fault=DIED)
    assert run.chosen() == 20


def test_one_that_is_written_again_is_another_one(run: Run) -> None:
    for _ in range(2):
        run.attempt(loads=20, fault=DIED)
    run.save(20, run.attempt(loads=10, started=True))
    assert run.chosen() == 20


def test_where_all_are_like_this_nothing_begins_anew_in_silence(run: Run) -> None:
    for step in (20, 10):
        for _ in range(2):
            run.attempt(loads=step, fault=DIED)
    with pytest.raises(RefusedError, match=r"no whole checkpoint.*step_00000010.*step_00000020.*load_step"):
        run.chosen()
