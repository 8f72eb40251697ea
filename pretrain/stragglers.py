"""Slow ranks: those that all the others wait for, named from the time that each rank spends on its own.

Collectives make every rank's step as long as the slowest one's, so wall time tells nothing. What differs is a rank's
*own* time: the part of a step in which it has not yet entered a collective, or has left the last one. A stopwatch runs
from the start of a step to the first collective (loading data, Python) and from the end of the update to the agreement
at the step's end (writing rows, garbage collection). It reads a clock four times a step; no device is waited for, and
one small gather over the control group each `telemetry.straggler_interval` steps is all the communication.

A rank is slow if its own time is above the ranks' median by more than `telemetry.straggler_share` of the step: so much
of each step the others stand still for it.

What it cannot see: a rank that is slow *inside* of forward and backward, a GPU that throttles, say. Its kernels and
collectives are queued on the device while the host runs ahead, and in a collective on the CPU the wait for others looks
like work. That takes times of kernels, per rank.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.conf.schema import Telemetry


class Stragglers:
    """One rank's stopwatch, and the comparison of all.

    Args:
        hosts: machine of every rank.
        telemetry: how often to compare, and when a rank is slow.
        group: the world, over gloo.
    """

    def __init__(self, hosts: Sequence[str], telemetry: Telemetry, group: dist.ProcessGroup) -> None:
        self._hosts, self._telemetry, self._group = hosts, telemetry, group
        self._since: float | None = None
        self._own_seconds = self._step_seconds = 0.0
        self._num_steps = -1
        """Steps since the last comparison; the first of an attempt, in which everything is new, does not count."""

    def works(self) -> None:
        """This rank does something that no other has a part in."""
        self._since = time.monotonic()

    def waits(self) -> None:
        """From here on it may wait for others."""
        if self._since is not None:
            self._own_seconds += time.monotonic() - self._since
            self._since = None

    def end_step(self, seconds: float) -> dict[str, Any] | None:
        """A step is over; where a comparison is due, the slow ranks since the last one.

        Args:
            seconds: from the step's start to its end, waits included.

        Returns:
            Data of an event; None where no rank is slow, where none is due, and on all ranks but 0.

        Collective: every `straggler_interval` steps a gather to rank 0 over the control group, two numbers a rank.
        """
        self._num_steps += 1
        self._step_seconds += seconds
        if self._num_steps == 0:
            self._own_seconds = self._step_seconds = 0.0
        if self._num_steps < 1 or self._num_steps != self._telemetry.straggler_interval:
            return None
        own = torch.tensor([self._own_seconds, self._step_seconds], dtype=torch.float64) / self._num_steps
        self._own_seconds = self._step_seconds = 0.0
        self._num_steps = 0
        everywhere = [torch.empty_like(own) for _ in self._hosts] if dist.get_rank() == 0 else None
        dist.gather(own, everywhere, dst=0, group=self._group)
        if everywhere is None:
            return None
        own_seconds, step_seconds = torch.stack(everywhere).T.tolist()
        return slow(own_seconds, statistics.median(step_seconds), self._hosts, self._telemetry.straggler_share)


def slow(
    own_seconds: Sequence[float], step_seconds: float, hosts: Sequence[str], share: float
) -> dict[str, Any] | None:
    """Which ranks are slow, the slowest first; None where none is.

    Args:
        own_seconds: of every rank, in the mean step.
        step_seconds: the mean step.
        hosts: machine of every rank.
        share: of the step, from which on a rank is slow.
    """
    median = statistics.median_low(own_seconds)  # of two ranks the faster one
    excess = [seconds - median for seconds in own_seconds]
    ranks = [rank for rank, above in enumerate(excess) if above > share * step_seconds]
    if not ranks:
        return None
    ranks.sort(key=lambda rank: -excess[rank])
    return {
        "ranks": ranks,
        "hosts": [hosts[rank] for rank in ranks],
        "own_seconds": [round(own_seconds[rank], 6) for rank in ranks],
        "median_seconds": round(median, 6),
        "ratios": [round(own_seconds[rank] / median, 2) if median > 0 else None for rank in ranks],
        "lost_seconds": round(excess[ranks[0]], 6),
        "share": round(excess[ranks[0]] / step_seconds, 3),
    }
