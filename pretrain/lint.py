"""Variables of NCCL, UCX and torch that were left set: which may stay in a script, and which must not.

NVIDIA's rule: variables that describe the system may live in scripts or in /etc/nccl.conf; those that tune or debug are
a workaround for the time of a search, and left behind they cost speed or hang a later version. So of each family the
few that describe a system are listed, and every other name of the family is one to ask about: new versions bring new
ones. Source: NCCL 2.28 user guide, "Environment Variables", whose two sections are "System configuration" and
"Debugging".
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SYSTEM = {
    "NCCL_SOCKET_IFNAME": "which interfaces ranks meet over; few sites need more",
    "NCCL_SOCKET_FAMILY": "IPv4 or IPv6",
    "NCCL_IB_HCA": "leaves out HCAs that belong to storage",
    "NCCL_IB_GID_INDEX": "which address of a RoCE port",
    "NCCL_IB_SL": "service level that the fabric's manager gave",
    "NCCL_IB_TC": "traffic class that the fabric's manager gave",
    "NCCL_IB_ROCE_VERSION_NUM": "RoCE version of the fabric",
    "NCCL_IB_ADDR_FAMILY": "address family of a RoCE port",
    "NCCL_IB_ADDR_RANGE": "addresses of RoCE ports",
    "NCCL_CROSS_NIC": "0 on rail-optimised fabrics",
    "NCCL_TOPO_FILE": "the topology, which virtual machines do not show",
    "NCCL_NET_PLUGIN": "the network library of a cloud",
    "NCCL_TUNER_PLUGIN": "the tuner of a cloud",
    "NCCL_CONF_FILE": "where the site's settings are",
    "NCCL_MNNVL_*": "NVLink domains over several nodes",
    "NCCL_RAS_*": "NCCL's own watch over a job",
    "NCCL_VERSION": "set by container images",
    "UCX_NET_DEVICES": "which interfaces UCX takes",
    "UCX_VERSION": "set by container images",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "the flight recorder, which should be on",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "the flight recorder, which should be on",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where the flight recorder writes",
    "TORCH_NCCL_ENABLE_MONITORING": "the watchdog's own watchdog",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "the watchdog's own watchdog",
}
"""Name or pattern -> what it says about a system. These may stay."""

_HARMLESS = {
    "NCCL_DEBUG": {"VERSION", "WARN"},
    "CUDA_LAUNCH_BLOCKING": {"0"},
    "TORCH_DISTRIBUTED_DEBUG": {"OFF"},
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": {"1", "3"},  # torchrun sets 1
}
"""Values that neither slow nor flood anything."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What variables of one pattern do when they are left set."""

    pattern: str
    why: str
    remedy: str = "unset it"


RULES = (
    Rule("NCCL_DEBUG", "INFO and TRACE write for every rank and communicator", "unset it, or NCCL_DEBUG=WARN"),
    Rule("NCCL_DEBUG_*", "belongs to a search with NCCL_DEBUG=INFO"),
    Rule("NCCL_TOPO_DUMP_FILE", "every start writes the topology"),
    Rule("NCCL_GRAPH_DUMP_FILE", "every start writes the rings and trees"),
    Rule(
        "NCCL_ALGO", "forces one algorithm for all sizes", "unset it; execution.deterministic_mode sets what it needs"
    ),
    Rule("NCCL_PROTO", "forces one protocol for all sizes; LL128 on the wrong machine gives wrong data"),
    Rule("NCCL_M??_NCHANNELS", "takes the number of SMs for communication out of NCCL's hands"),
    Rule("NCCL_M??_CTAS", "takes the number of SMs for communication out of NCCL's hands"),
    Rule("NCCL_P2P_*", "turns NVLink or PCIe between GPUs off, or bends it"),
    Rule("NCCL_SHM_*", "turns shared memory within a node off"),
    Rule("NCCL_IB_DISABLE", "=1 leaves sockets in place of InfiniBand, many times slower"),
    Rule("NCCL_NET_GDR_*", "overrules where GPUs and NICs talk directly"),
    Rule("NCCL_NVLS_*", "turns NVLink SHARP off, or bends it"),
    Rule("NCCL_IB_*", "tunes InfiniBand for a fabric and a version"),
    Rule("NCCL_BLOCKING_WAIT", "makes the host wait for every collective"),
    Rule("NCCL_*", "tunes or debugs NCCL"),
    Rule("UCX_LOG_*", "writes for every message"),
    Rule("UCX_*", "tunes or debugs UCX"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", "makes the host wait for every collective"),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", "a rank that waits for a lost one may wait for ever"),
    Rule("TORCH_NCCL_*", "tunes or debugs torch's use of NCCL"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "checks every collective with another one"),
    Rule("TORCH_CPP_LOG_LEVEL", "writes for every collective"),
    Rule("TORCH_SHOW_CPP_STACKTRACES", "belongs to a search"),
    Rule("TORCH_LOGS", "belongs to a search"),
    Rule("CUDA_LAUNCH_BLOCKING", "makes the host wait for every kernel"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "asks CUDA for every tensor's memory"),
    Rule("NVTE_DEBUG*", "Transformer Engine writes for every layer"),
)
"""The first that fits a name counts."""

_ASSIGNMENT = re.compile(r"(?:^|[\s;&|({])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|)}]*)")
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True, slots=True)
class Left:
    """One variable that was left set."""

    name: str
    value: str | None
    """None where it is not known."""
    rule: Rule

    def __str__(self) -> str:
        shown = self.name if self.value is None else f"{self.name}={self.value}"
        return f"{shown}: {self.rule.why}; {self.rule.remedy}"


def left_set(variables: Mapping[str, str | None]) -> list[Left]:
    """Variables that should not be there, by name.

    Args:
        variables: name -> value; None where it is not known.
    """
    found = []
    for name, value in sorted(variables.items()):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in SYSTEM):
            continue
        if name in _HARMLESS and (value is None or value.upper() in _HARMLESS[name]):
            continue
        rule = next((rule for rule in RULES if fnmatch.fnmatchcase(name, rule.pattern)), None)
        if rule is not None:
            found.append(Left(name, value, rule))
    return found


def assignments(lines: Iterable[str]) -> dict[str, str | None]:
    """Variables that lines of bash set: `export A=1; B=2`; a comment sets none."""
    return {name: value.strip("\"'") for line in lines for name, value in _ASSIGNMENT.findall(_COMMENT.sub("", line))}
