"""`shardwright preflight`: is this machine, or every node of a job step, fit to train?

Alone it checks this machine. As a task of srun, or a rank of torchrun, all of them meet, test the ways between them,
and rank 0 judges (`preflight_results`), writes the report and prints the table. Exit code 0 says that all are fit, 5
that some are not, or that some did not answer.

A preflight is no training: it takes no run's folder and no configuration, and nothing of it stays behind.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.conf.problems import Problem, RefusedError
from shardwright.pretrain import machine, preflight_groups, preflight_local, ranks, terminal
from shardwright.pretrain.faults import NOT_FIT
from shardwright.pretrain.folder import write_atomic
from shardwright.pretrain.preflight_examine import Examination, first_line
from shardwright.pretrain.preflight_lead import Lead, add
from shardwright.pretrain.preflight_local import HungError, bounded
from shardwright.pretrain.preflight_report import Report, show
from shardwright.pretrain.preflight_results import BAD, Baseline, Finding, Node, compare, nodes_of
from shardwright.pretrain.ranks import RankEnvironment

if TYPE_CHECKING:  # torch takes seconds to import
    from shardwright.pretrain.preflight_meeting import Meeting


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What was typed."""

    folder: Path
    gpus: int | None
    baseline: Path | None
    write_baseline: Path | None
    report: Path | None
    fraction: float
    timeout_seconds: float
    group_timeout_seconds: float
    disk_bytes: int
    least_free_bytes: int
    as_json: bool
    ib_root: Path = preflight_local.IB_ROOT

    @property
    def slack_seconds(self) -> float:
        """What a test of ranks may take above its timeout, for what comes with it."""
        return max(1.0, self.group_timeout_seconds / 4)


def run(options: Options, environ: Mapping[str, str] = os.environ) -> int:
    """Check, judge, report.

    Returns:
        The exit code. As one of several ranks this function does not return: a hung thread must not hold the process.

    Raises:
        RefusedError: the baseline cannot be used, or the variables of a launcher contradict each other.
    """
    baseline = Baseline.read(options.baseline) if options.baseline else None
    environment, environ = ranks.detect(environ), dict(environ)
    if environment is not None:
        from shardwright.pretrain import rank

        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what fails is said in one line, not with C++'s stack
        rank.leave(_together(environment, options, baseline, environ))
    examined = Examination(options, environ, ranks.host_name(environ), None)
    with machine.watch_xids(environ) as xids:
        result = examined.result()
        nodes = nodes_of([result])
        add(nodes, {0: examined.afterwards(xids)}, {0: result})
    compare(nodes, baseline, options.fraction)
    return _conclude(
        Report(nodes=nodes, num_ranks=1, baseline=str(options.baseline) if options.baseline else None), options
    )


def _together(
    environment: RankEnvironment, options: Options, baseline: Baseline | None, environ: Mapping[str, str]
) -> int:
    """One of several ranks, from meeting to verdict."""
    from shardwright.pretrain.preflight_meeting import Meeting

    tasks = ranks.tasks_of_nodes(environ)
    started = time.monotonic()
    try:
        meeting = Meeting.join(environment, options.timeout_seconds)
    except RuntimeError as error:
        if environment.rank == 0:
            key, rule = "MASTER_PORT", f"the store cannot be served there: {first_line(error)}"
            raise RefusedError([Problem(key=key, value=environment.master_port, rule=rule)]) from None
        return _without_rank_0(environment, options, tasks, first_line(error))
    examined = Examination(options, environ, environment.host, environment)
    with machine.watch_xids(environ) as xids:
        result = examined.result()
        lead = Lead(environment, options, baseline, tasks, meeting) if environment.rank == 0 else None
        try:
            meeting.post("local", result.as_json())
            if lead is not None:
                lead.plan(deadline=started + options.timeout_seconds)
            stages = meeting.told("stages", 2 * options.timeout_seconds + options.slack_seconds)
            begun = time.monotonic()
            well = _take_part(meeting, environment, options, stages)
            if lead is not None:
                lead.plan_all(begun)
            count = len(stages) + 2
            everybody = meeting.told("all", count * (options.group_timeout_seconds + options.slack_seconds))
            if well:
                _take_part(meeting, environment, options, {preflight_groups.ALL: [everybody]})
            meeting.post("afterwards", examined.afterwards(xids))
            if lead is not None:
                report = lead.judge()
                code = _conclude(report, options)
                lead.release(report.fit)
                return code
            fit = meeting.told("fit", 2 * (options.group_timeout_seconds + options.slack_seconds))
            meeting.post("bye", None)
            return 0 if fit else NOT_FIT
        except RuntimeError as error:
            if lead is not None:
                raise
            return _without_rank_0(environment, options, tasks, f"rank 0 has left: {first_line(error)}")


def _take_part(
    meeting: "Meeting", environment: RankEnvironment, options: Options, stages: preflight_groups.Groups
) -> bool:
    """Be in this rank's group of every stage; post how it went. False where a test hangs: no other can follow it."""
    from shardwright.pretrain import preflight_torch

    (device, *_) = preflight_torch.devices(environment.local_rank, environment.local_world_size)
    limit = options.group_timeout_seconds
    for stage, groups in stages.items():
        members = next((group for group in groups if environment.rank in group), None)
        if members is None or len(members) == 1:
            continue

        def test(stage: str = stage, members: list[int] = members) -> float:
            return preflight_torch.all_reduce(
                meeting.store, stage, members, environment.rank, device, timeout_seconds=limit
            )

        hung = False
        try:
            outcome: dict[str, Any] = {"gb_per_second": bounded(limit + options.slack_seconds, test)}
        except Exception as error:
            hung, outcome = isinstance(error, HungError), {"error": first_line(error)}
        meeting.post(stage, outcome | {"members": members})
        if hung:
            return False
    return True


def _conclude(report: Report, options: Options) -> int:
    """Write and print; the exit code."""
    text = json.dumps(report.as_json(), indent=1)
    if options.report is not None:
        _write(options.report, text + "\n")
    if options.as_json:
        print(text)
    else:
        show(report, terminal.console(120))
    sys.stdout.flush()
    if options.write_baseline is not None:
        if report.fit:
            _write(options.write_baseline, Baseline.of(list(report.nodes.values()), report.group).text())
        else:
            print(f"{options.write_baseline} is not written: what is not fit is no baseline", file=sys.stderr)
    return 0 if report.fit else NOT_FIT


def _without_rank_0(environment: RankEnvironment, options: Options, tasks: Mapping[str, int], why: str) -> int:
    """Rank 0 is not there: its node is the bad one, and whoever finds that out first writes the report.

    Unless rank 0 has written one and left before this rank came, which then is the late one.
    """
    node = next(iter(tasks), environment.master_addr)
    nodes = {node: Node(name=node, ranks=[0], findings={"answer": Finding(BAD, f"no answer from rank 0: {why}")})}
    nodes.setdefault(environment.host, Node(name=environment.host, ranks=[environment.rank]))
    report = Report(nodes=nodes, num_ranks=environment.world_size, launch_id=environment.launch_id)
    print(f"{environment.host}: no answer from rank 0 on {node}: {why}", file=sys.stderr)
    if options.report is not None:
        with suppress(OSError, ValueError, AttributeError):
            if json.loads(options.report.read_text()).get("launch_id") == environment.launch_id:
                return NOT_FIT
        _write(options.report, json.dumps(report.as_json(), indent=1) + "\n")
    return NOT_FIT


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
