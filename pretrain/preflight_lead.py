"""What rank 0 of a preflight does besides its own checks: who takes part, who is to blame, the report."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.pretrain import preflight_groups
from shardwright.pretrain.preflight_report import Report
from shardwright.pretrain.preflight_results import (
    BAD,
    OK,
    Baseline,
    Finding,
    Node,
    RankResult,
    compare,
    judge_group,
    name_missing,
    nodes_of,
)
from shardwright.pretrain.ranks import RankEnvironment

if TYPE_CHECKING:  # they need torch, or this module
    from shardwright.pretrain.preflight import Options
    from shardwright.pretrain.preflight_meeting import Meeting

_LINGER_SECONDS = 5
"""Rank 0 serves the store for so long after its verdict, unless all have read it before."""


class Lead:
    """What rank 0 does besides: who takes part, who is to blame, the report."""

    def __init__(
        self,
        environment: RankEnvironment,
        options: "Options",
        baseline: Baseline | None,
        tasks: Mapping[str, int],
        meeting: "Meeting",
    ) -> None:
        self._environment, self._options, self._baseline = environment, options, baseline
        self._tasks, self._meeting = tasks, meeting
        self._results: dict[int, RankResult] = {}
        self._nodes: dict[str, Node] = {}
        self._stages: preflight_groups.Groups = {}
        self._everybody: list[int] = []
        self._lost: set[int] = set()

    def plan(self, deadline: float) -> None:
        """Wait for what the ranks found by themselves; say who talks to whom."""
        world_size = self._environment.world_size
        posted = self._meeting.collect("local", range(world_size), deadline)
        self._results = {rank: RankResult.of_json(content) for rank, content in posted.items()}
        self._nodes = nodes_of(self._results.values())
        why = f"no answer within {self._options.timeout_seconds:g} s"
        name_missing(self._nodes, self._results, world_size, self._tasks, why)
        compare(self._nodes, None, 0.0)  # a node with fewer GPUs than others must not take part on its CPU
        self._stages = preflight_groups.stages(self._fit())
        self._meeting.tell("stages", self._stages)

    def plan_all(self, begun: float) -> None:
        """Wait for the tests of small groups, blame, and say who takes part in the test of all."""
        members = {rank for ranks in self._fit().values() for rank in ranks}
        worked: dict[preflight_groups.Edge, bool] = {}
        for number, (stage, groups) in enumerate(self._stages.items(), start=1):
            deadline = begun + number * (self._options.group_timeout_seconds + self._options.slack_seconds)
            expected = [rank for group in groups for rank in group if rank in members]
            outcomes = self._meeting.collect(stage, expected, deadline)
            for rank in set(expected) - set(outcomes):
                members.discard(rank)
                self._lost.add(rank)
                self._node(rank).add("answer", Finding(BAD, f"no answer any more from rank {rank} in test {stage}"))
            for rank, outcome in outcomes.items():
                self._note(stage, rank, outcome, worked)
        lost = {node.name for node in self._nodes.values() if node.reasons}
        for name, reason in preflight_groups.blame(worked, lost).items():
            self._nodes[name].add("neighbours", Finding(BAD, reason))
        self._everybody = [rank for ranks in self._fit().values() for rank in ranks]
        self._meeting.tell(preflight_groups.ALL, self._everybody)

    def judge(self) -> Report:
        """Wait for the test of all, and judge."""
        deadline = time.monotonic() + self._options.group_timeout_seconds + self._options.slack_seconds
        group = None
        if len(self._everybody) > 1:
            group = self._judge_all(self._meeting.collect(preflight_groups.ALL, self._everybody, deadline))
        add(self._nodes, self._meeting.collect("afterwards", self._there(), deadline), self._results)
        compare(self._nodes, self._baseline, self._options.fraction)
        return Report(
            nodes={name: self._nodes[name] for name in sorted(self._nodes, key=self._place)},
            num_ranks=self._environment.world_size,
            group=group,
            launch_id=self._environment.launch_id,
            baseline=None if self._options.baseline is None else str(self._options.baseline),
        )

    def release(self, fit: bool) -> None:
        """Tell the others the verdict, and wait until they have heard it."""
        self._meeting.tell("fit", fit)
        others = self._there() - {self._environment.rank}
        self._meeting.collect("bye", others, time.monotonic() + _LINGER_SECONDS)

    def _judge_all(self, outcomes: Mapping[int, Any]) -> Finding:
        silent = [rank for rank in self._everybody if rank not in outcomes]
        self._lost |= set(silent)
        for rank in silent:
            self._node(rank).add("answer", Finding(BAD, f"no answer any more from rank {rank} in the test of all"))
        errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in outcomes.items() if "error" in outcome]
        if errors or silent:
            return Finding(BAD, (errors or [f"{len(silent)} ranks did not answer"])[0])
        slowest = min(outcome["gb_per_second"] for outcome in outcomes.values())
        finding = Finding(OK, f"{len(self._everybody)} ranks", {"all_reduce_bus_gb_per_second": slowest})
        return judge_group(finding, self._baseline, self._options.fraction)

    def _note(
        self, stage: str, rank: int, outcome: Mapping[str, Any], worked: dict[preflight_groups.Edge, bool]
    ) -> None:
        """Put the outcome of one rank's test to its node, and to the pair of nodes that it was a test of."""
        node, well = self._node(rank), "error" not in outcome
        if stage == preflight_groups.IN_NODE:
            rates = {"in_node_bus_gb_per_second": outcome["gb_per_second"]} if well else {}
            node.add(stage, Finding(OK if well else BAD, outcome.get("error", ""), rates))
            return
        a, b = (self._node(member).name for member in outcome["members"])
        worked[a, b] = worked.get((a, b), True) and well
        known = node.findings.get("neighbours")
        # the better one of a node's two neighbours: the other may be the slow one
        rate = max(outcome.get("gb_per_second", 0.0), known.rates.get("pair_bus_gb_per_second", 0.0) if known else 0.0)
        node.findings["neighbours"] = Finding(OK, "", {"pair_bus_gb_per_second": rate} if rate else {})

    def _node(self, rank: int) -> Node:
        return self._nodes[self._results[rank].node]

    def _there(self) -> set[int]:
        """Ranks that answer still."""
        return self._results.keys() - self._lost

    def _fit(self) -> dict[str, list[int]]:
        """Fit nodes and their ranks, in the order of ranks."""
        return {node.name: node.ranks for node in self._nodes.values() if not node.reasons}

    def _place(self, name: str) -> tuple[int, str]:
        order = list(self._tasks) or list(self._nodes)
        return order.index(name) if name in order else len(order), name


def add(nodes: dict[str, Node], found: Mapping[int, Any], results: Mapping[int, RankResult]) -> None:
    """Put what came up during the tests to the nodes."""
    for rank, findings in found.items():
        for check, content in findings.items():
            nodes[results[rank].node].add(check, Finding(**content))
