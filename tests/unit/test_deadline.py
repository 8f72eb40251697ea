"""When a run leaves its job by itself."""

import time

from shardwright.pretrain.deadline import SLACK_SECONDS, Deadline


def ends_in(seconds: float, exit_before: int | None = None) -> Deadline:
    return Deadline.of({"SLURM_JOB_END_TIME": str(int(time.time() + seconds))}, exit_before)


def test_a_run_that_nobody_ends_never_leaves_by_itself() -> None:
    for environ in ({}, {"SLURM_JOB_END_TIME": ""}, {"SLURM_JOB_END_TIME": "0"}):
        deadline = Deadline.of(environ, None)
        deadline.took("save", 1e9)
        assert not deadline.near()


def test_it_leaves_in_time_for_what_it_has_measured_and_no_sooner() -> None:
    deadline = ends_in(200)
    assert not deadline.near()
    deadline.took("step", 10)
    deadline.took("evaluation", 30)
    deadline.took("save", 50)
    deadline.took("save", 20)
    assert deadline.lead_seconds == 10 + 30 + 2 * 50 + SLACK_SECONDS
    assert not deadline.near()
    deadline.took("step", 45)
    assert deadline.near()


def test_a_time_that_is_given_counts_alone() -> None:
    assert ends_in(100, exit_before=120).near()
    assert not ends_in(100, exit_before=60).near()
    never = ends_in(-100, exit_before=0)
    never.took("save", 50)
    assert not never.near()
