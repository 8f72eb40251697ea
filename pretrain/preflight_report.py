"""What a preflight says: the report, a JSON object that scripts read, and the table that a person reads."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.pretrain.events import now
from shardwright.pretrain.preflight_results import BAD, CHECKS, OK, SKIPPED, WARNING, Finding, Node, short

VERSION = 1
_STYLES = {OK: "green", SKIPPED: "dim", WARNING: "yellow", BAD: "bold red"}
_UNITS = {"gemm_tflops": "TFLOP/s", "gb_per_second": "GB/s"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The verdict over all nodes."""

    nodes: Mapping[str, Node]
    num_ranks: int
    group: Finding | None = None
    """The all-reduce over all fit nodes; None where there was none."""
    launch_id: str | None = None
    """The same for all ranks of one launch; None for a machine alone."""
    baseline: str | None = None
    """Its file."""
    time: str = field(default_factory=now)

    @property
    def bad_nodes(self) -> dict[str, list[str]]:
        """Node -> why it is not fit."""
        return {name: node.reasons for name, node in self.nodes.items() if node.reasons}

    @property
    def fit(self) -> bool:
        """Whether all of them can train together."""
        return not self.bad_nodes and (self.group is None or self.group.state != BAD)

    def as_json(self) -> dict[str, Any]:
        """The report as scripts read it; see docs/slurm.md."""
        bad = self.bad_nodes
        return {
            "version": VERSION,
            "time": self.time,
            "launch_id": self.launch_id,
            "fit": self.fit,
            "exclude": ",".join(bad),
            "bad_nodes": [{"node": name, "reasons": reasons} for name, reasons in bad.items()],
            "num_nodes": len(self.nodes),
            "num_ranks": self.num_ranks,
            "baseline": self.baseline,
            "group": None if self.group is None else asdict(self.group),
            "nodes": {
                name: {
                    "ranks": node.ranks,
                    "device": node.device,
                    "fit": not node.reasons,
                    "checks": {check: asdict(node.findings[check]) for check in CHECKS if check in node.findings},
                }
                for name, node in self.nodes.items()
            },
        }


def show(report: Report, console: Console) -> None:
    """Print a row per check, the nodes that differ by name, and the verdict."""
    nodes = list(report.nodes.values())
    devices = dict.fromkeys(node.device for node in nodes if node.device != "unknown")
    ranks = f"{report.num_ranks} rank{'s' if report.num_ranks != 1 else ''}"
    console.print(
        Text(
            f"preflight of {_named(list(report.nodes))}, {ranks}, on {', '.join(devices) or 'nothing known'}",
            style="bold",
        )
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("check", "state", "found", "nodes that differ"):
        table.add_column(column, overflow="fold", no_wrap=column in ("check", "state"))
    for check in CHECKS:
        found = {node.name: node.findings[check] for node in nodes if check in node.findings}
        if found:
            table.add_row(check, *_row(found))
    if report.group is not None:
        state = Text(report.group.state, style=_STYLES[report.group.state])
        table.add_row("all_reduce", state, _rates([report.group]) or report.group.detail, _why([report.group]))
    console.print(table)
    for name, reasons in report.bad_nodes.items():
        console.print(Text(f"{name} is not fit: {'; '.join(reasons)}", style=_STYLES[BAD]))
    if report.group is not None and report.group.state == BAD:
        console.print(Text(f"together they are not fit: {report.group.detail}", style=_STYLES[BAD]))
    if report.fit:
        console.print(Text("fit", style=_STYLES[OK]))


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} nodes, {short(names)}"


def _row(found: Mapping[str, Finding]) -> tuple[Text, str, str]:
    """State, what most found, and who found something else."""
    states = [finding.state for finding in found.values()]
    worst = next(state for state in (BAD, WARNING, OK, SKIPPED) if state in states)
    usual = max(dict.fromkeys(states), key=states.count)
    alike = [finding for finding in found.values() if finding.state == usual]
    parts = [_rates(alike)]
    details = dict.fromkeys(finding.detail for finding in alike if finding.detail)
    if len(details) == 1 or len(found) == 1:
        parts += details
    odd = {name: finding for name, finding in found.items() if finding.state != usual}
    if not odd and len(details) > 1:
        odd = {name: finding for name, finding in found.items() if finding.detail}
    differ = "; ".join(f"{name}: {finding.detail or finding.state}" for name, finding in odd.items())
    return Text(worst, style=_STYLES[worst]), "; ".join(filter(None, parts)), differ


def _rates(findings: Sequence[Finding]) -> str:
    """`gemm 612 TFLOP/s (598-615)`: median and range over nodes."""
    parts = []
    for name in dict.fromkeys(name for finding in findings for name in finding.rates):
        values = [finding.rates[name] for finding in findings if name in finding.rates]
        ending = next(ending for ending in _UNITS if name.endswith(ending))
        what = name.removesuffix(ending).strip("_").replace("_", " ")
        text = f"{what} {statistics.median(values):.3g} {_UNITS[ending]}".strip()
        parts.append(text + (f" ({min(values):.3g}-{max(values):.3g})" if len(values) > 1 else ""))
    return ", ".join(parts)


def _why(findings: Sequence[Finding]) -> str:
    return "; ".join(finding.detail for finding in findings if finding.state != OK)
