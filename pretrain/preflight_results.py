"""What the checks of a preflight found: by each rank, put together for each node, judged against others and a baseline.

A check finds something `ok`, worth a `warning`, `bad`, or is `skipped` with its reason; a bad one makes the node unfit.
Rates (TFLOP/s, GB/s) are no verdict by themselves: a node is bad if one is below a fraction of the site's baseline or
of the median of all nodes. Two nodes have no median that says which of them is the slow one, so it takes three. Counts
(GPUs, active ports) must not be below what most nodes have, nor below the baseline's.

Plain data and arithmetic; nothing here communicates or measures.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.spans import spans

OK, SKIPPED, WARNING, BAD = "ok", "skipped", "warning", "bad"
_SEVERITY = (OK, SKIPPED, WARNING, BAD)
CHECKS = (
    "answer",
    "environment",
    "gpus",
    "gpu_health",
    "xid",
    "infiniband",
    "disk",
    "gemm",
    "copies",
    "in_node",
    "neighbours",
)
"""Names of the checks of a node, in the order of the table."""
LEAST_NODES_OF_A_MEDIAN = 3
NOT_COMPARED = ("disk_write_gb_per_second", "disk_read_gb_per_second")
"""Rates that say little about a node: the folder is shared, and nodes wait for each other. A baseline still counts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    state: str
    detail: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    """More is better."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """As many as others have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What one rank found by itself; travels to rank 0 as JSON."""

    rank: int
    node: str
    device: str
    """Name of its GPU, or `cpu`."""
    findings: Mapping[str, Finding]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "RankResult":
        """What `as_json` made."""
        findings = {check: Finding(**finding) for check, finding in content["findings"].items()}
        return cls(rank=content["rank"], node=content["node"], device=content["device"], findings=findings)


@dataclass(kw_only=True, slots=True)
class Node:
    """One node, from the results of its ranks."""

    name: str
    ranks: list[int] = field(default_factory=list)
    device: str = "unknown"
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Why it is not fit; empty for a fit one."""
        return [f"{check}: {self.findings[check].detail}" for check in CHECKS if self._is(check, BAD)]

    def add(self, check: str, finding: Finding) -> None:
        """Put a finding to what is known of the same check."""
        self.findings[check] = _together([self.findings[check], finding]) if check in self.findings else finding

    def _is(self, check: str, state: str) -> bool:
        return check in self.findings and self.findings[check].state == state


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a fit node of this site reaches; medians of a preflight that was fit."""

    device: str
    rates: Mapping[str, float]
    counts: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """The baseline of a file.

        Raises:
            RefusedError: it is not there, or not what `--write-baseline` writes.
        """
        try:
            content = json.loads(path.read_text())
            rates, counts = (
                {str(name): float(value) for name, value in content[part].items()} for part in ("rates", "counts")
            )
            return cls(device=str(content["device"]), rates=rates, counts=counts)
        except OSError as error:
            rule = f"cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            rule = "is no baseline"
        remedy = "shardwright preflight --write-baseline FILE, on nodes that are known to be well"
        raise RefusedError([Problem(key="--baseline", value=path, rule=rule, remedy=remedy)])

    @classmethod
    def of(cls, nodes: Sequence[Node], group: Finding | None) -> "Baseline":
        """Medians over nodes, and the rate of the group."""
        kinds = Counter(node.device for node in nodes)
        rates, counts = _by_name(nodes, "rates"), _by_name(nodes, "counts")
        medians = {name: statistics.median(values.values()) for name, values in rates.items()}
        return cls(
            device=kinds.most_common(1)[0][0],
            rates=medians | dict(group.rates if group else {}),
            counts={name: _usual(values.values()) for name, values in counts.items()},
        )

    def text(self) -> str:
        """Content of its file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def nodes_of(results: Iterable[RankResult]) -> dict[str, Node]:
    """Nodes, from what their ranks found: the worst state, all details, the lowest rates and counts."""
    nodes: dict[str, Node] = {}
    for result in sorted(results, key=lambda result: result.rank):
        node = nodes.setdefault(result.node, Node(name=result.node))
        node.ranks.append(result.rank)
        node.device = result.device
        for check, finding in result.findings.items():
            node.add(check, finding)
    return nodes


def name_missing(
    nodes: dict[str, Node], came: Iterable[int], world_size: int, tasks: Mapping[str, int], why: str
) -> None:
    """Say of every node whether its ranks all came (check `answer`); nodes that sent nothing are added.

    Args:
        nodes: changed in place.
        came: ranks that came.
        world_size: ranks that were started.
        tasks: node -> ranks that were started on it; empty where that is not known, and ranks are named instead.
        why: what they did not do, as in "no answer within 60 s".
    """
    missing = sorted(set(range(world_size)) - set(came))
    for node in nodes.values():
        node.add("answer", Finding(OK))
    for name, expected in tasks.items():
        there = len(set(nodes[name].ranks) & set(came)) if name in nodes else 0
        if there < expected:
            detail = why if there == 0 else f"{why} of {expected - there} of its {expected} ranks"
            nodes.setdefault(name, Node(name=name)).add("answer", Finding(BAD, detail))
    if not tasks:
        known = {rank: node for node in nodes.values() for rank in node.ranks}
        for rank in missing:
            node = known.get(rank) or nodes.setdefault(f"rank {rank}", Node(name=f"rank {rank}", ranks=[rank]))
            node.add("answer", Finding(BAD, why))


def compare(nodes: Mapping[str, Node], baseline: Baseline | None, fraction: float) -> None:
    """Mark nodes whose rates or counts are too low; `nodes` is changed in place.

    Args:
        nodes: those that answered.
        baseline: the site's, or None.
        fraction: of the baseline and of the median that is still good enough.
    """
    answered = [node for node in nodes.values() if node.findings.keys() - {"answer"}]
    for name, values in _by_name(answered, "rates").items():
        limits = []
        if baseline is not None and name in baseline.rates:
            limits.append((baseline.rates[name], "the baseline's"))
        if len(values) >= LEAST_NODES_OF_A_MEDIAN and name not in NOT_COMPARED:
            limits.append((statistics.median(values.values()), "the nodes' median"))
        for node, value in values.items():
            for limit, whose in limits:
                if value < fraction * limit:
                    share = f"{value:.3g} is {value / limit:.0%} of {whose} {limit:.3g}"
                    _mark(nodes[node], name, f"{name} {share}")
    for name, values in _by_name(answered, "counts").items():
        for node, value in values.items():
            if baseline is not None and value < baseline.counts.get(name, 0):
                _mark(nodes[node], name, f"{name} {value:g}, the baseline has {baseline.counts[name]:g}")
            if value < (usual := _usual(values.values())):
                _mark(nodes[node], name, f"{name} {value:g}, other nodes have {usual:g}")
    with_gpus = {node.device for node in answered} - {"cpu", "unknown"}
    for known in answered if with_gpus else ():
        if known.device not in with_gpus:
            known.add(
                "gpus", Finding(BAD, f"computes on {known.device}, other nodes on {', '.join(sorted(with_gpus))}")
            )
    if baseline is not None:
        for known in answered:
            if known.device != baseline.device:
                known.add("gpus", Finding(BAD, f"computes on {known.device}, the baseline on {baseline.device}"))


def judge_group(group: Finding, baseline: Baseline | None, fraction: float) -> Finding:
    """The same for what all nodes reach together, which no single node is to blame for."""
    for name, value in group.rates.items():
        limit = baseline.rates.get(name) if baseline is not None else None
        if limit and value < fraction * limit:
            detail = f"{name} {value:.3g} is {value / limit:.0%} of the baseline's {limit:.3g}"
            return Finding(BAD, detail, group.rates)
    return group


def short(names: Sequence[str]) -> str:
    """Names of nodes, those that differ in their last number put together as Slurm does: n[1-3,7]."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem = name.rstrip("0123456789")
        groups.setdefault(stem, []).append(name[len(stem) :])
    parts = []
    for stem, numbers in groups.items():
        plain = all(number and not number.startswith("0") for number in numbers)
        if plain and len(numbers) > 1:
            parts.append(f"{stem}[{spans(sorted(map(int, numbers)))}]")
        else:
            parts += [stem + number for number in numbers]
    return ",".join(parts)


def _together(findings: Sequence[Finding]) -> Finding:
    state = max((finding.state for finding in findings), key=_SEVERITY.index)
    worst = [finding.detail for finding in findings if finding.state == state and finding.detail]
    lowest: dict[str, dict[str, float]] = {"rates": {}, "counts": {}}
    for kind, known in lowest.items():
        for finding in findings:
            for name, value in getattr(finding, kind).items():
                known[name] = min(value, known.get(name, value))
    return Finding(state, "; ".join(dict.fromkeys(worst)), **lowest)


def _mark(node: Node, name: str, detail: str) -> None:
    """Make the check that a rate or count belongs to a bad one."""
    check = next(check for check, finding in node.findings.items() if name in finding.rates or name in finding.counts)
    node.add(check, Finding(BAD, detail))


def _by_name(nodes: Iterable[Node], kind: str) -> dict[str, dict[str, float]]:
    """Rate or count -> node -> value."""
    values: dict[str, dict[str, float]] = {}
    for node in nodes:
        for finding in node.findings.values():
            for name, value in getattr(finding, kind).items():
                values.setdefault(name, {})[node.name] = value
    return values


def _usual(values: Iterable[float]) -> float:
    """What most have; of what as many have, the larger one."""
    counted = Counter(values)
    return max(counted, key=lambda value: (counted[value], value))
