"""All that one rank of a preflight finds by itself: before the tests of groups, and what came up while they ran."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwright.pretrain import machine, preflight_local
from shardwright.pretrain.preflight_results import BAD, SKIPPED, Finding, Node, RankResult
from shardwright.pretrain.ranks import RankEnvironment

if TYPE_CHECKING:
    from shardwright.pretrain.preflight import Options


class Examination:
    """What one rank finds by itself, before and after the tests of groups."""

    def __init__(
        self, options: "Options", environ: Mapping[str, str], node: str, environment: RankEnvironment | None
    ) -> None:
        self._options, self._environ, self._node = options, environ, node
        self._rank = environment.rank if environment else 0
        self._local = (environment.local_rank, environment.local_world_size) if environment else (0, 1)
        self._ports = preflight_local.counters(options.ib_root) if self._local[0] == 0 else {}
        self._has_gpus = False

    def result(self) -> RankResult:
        """All checks that need no other rank; those of the node by its first rank alone."""
        options, findings = self._options, dict[str, Finding]()
        if self._local[0] == 0:
            findings["environment"] = preflight_local.environment(self._environ)
            findings["infiniband"] = preflight_local.infiniband(options.ib_root)
            findings["disk"] = _guarded(
                options.timeout_seconds / 2,
                lambda: preflight_local.disk(
                    options.folder, num_bytes=options.disk_bytes, least_free_bytes=options.least_free_bytes
                ),
            )
        device, measured = self._measure()
        findings |= measured
        # right after the load, before clocks and PCIe fall asleep
        health, notes = machine.gpu_health(self._environ)
        self._has_gpus = bool(health)
        if health and device == "cpu":
            measured["gemm"] = Finding(BAD, f"NVML shows {len(health)} GPUs, but torch sees none")
            findings |= measured
        if self._local[0] == 0:
            findings["gpus"] = preflight_local.gpus(health, notes, options.gpus)
        mine = [gpu for gpu in health if gpu.index % self._local[1] == self._local[0] or len(health) < self._local[1]]
        findings["gpu_health"] = preflight_local.gpu_health(mine, notes)
        return RankResult(rank=self._rank, node=self._node, device=device, findings=findings)

    def afterwards(self, xids: Callable[[], list[tuple[int, int]]]) -> dict[str, Any]:
        """What came up while the tests ran: XIDs, and growing error counters; check -> finding as JSON values."""
        if self._local[0] != 0:
            return {}
        found = {"xid": preflight_local.xids(xids(), self._has_gpus)}
        if self._ports:
            found["infiniband"] = preflight_local.grown(self._ports, preflight_local.counters(self._options.ib_root))
        return {check: _plain(finding) for check, finding in found.items()}

    def _measure(self) -> tuple[str, dict[str, Finding]]:
        """Name of this rank's device, products and copies."""
        try:
            from shardwright.pretrain import preflight_torch
        except ImportError as error:
            return "unknown", {"gemm": Finding(BAD, f"torch cannot be imported: {error}")}
        limit = self._options.timeout_seconds / 2
        device, found = "unknown", dict[str, Finding]()
        node = Node(name=self._node)
        try:
            for one in preflight_local.bounded(limit, partial(preflight_torch.devices, *self._local)):
                device = preflight_local.bounded(limit, partial(preflight_torch.name_of, one))
                node.add("gemm", _guarded(limit, partial(preflight_torch.gemm, one)))
                if one.type == "cuda":
                    node.add("copies", _guarded(limit, partial(preflight_torch.copies, one)))
        except RuntimeError as error:  # CUDA does not start, or hangs
            node.add("gemm", Finding(BAD, first_line(error)))
        found |= node.findings
        found.setdefault("copies", Finding(SKIPPED, "no GPU"))
        return device, found


def _guarded(seconds: float, check: Callable[[], Finding]) -> Finding:
    """The finding of a check; whatever it raises, and that it hangs, is bad."""
    try:
        return preflight_local.bounded(seconds, check)
    except Exception as error:
        return Finding(BAD, f"{type(error).__name__}: {first_line(error)}")


def _plain(finding: Finding) -> dict[str, Any]:
    return {"state": finding.state, "detail": finding.detail}


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch appends."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
