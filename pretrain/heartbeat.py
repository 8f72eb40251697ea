"""A rank's sign of life: what it does, since when, and how long that may take, where its guardian sees it.

The rank and its guardian (`guard`) share a page of memory, made before the one forks the other. A beat is one write
into it: no system call, no file, no message; so a rank may beat several times a step, under any launcher, and a
thousand ranks cost what one costs. The alternatives cost more or see less: a file per rank loads the metadata server of
a shared file system, the ranks' store and collectives hang with whoever hangs, and a thread of the rank stands still
with it (SIGSTOP, a native call that keeps the interpreter's lock).

All ranks beat at the same places in the same order, because all decisions of a run are the same on all ranks. So the
number of beats is a position: of ranks that hang together, the one with the fewest is behind, and the others wait for
it. The guardian compares numbers of beats alone; a number that it reads while it is written is another one a moment
later, so nothing needs a lock.
"""

import itertools
import json
import math
import mmap
import struct
from typing import Any

from shardwright.conf.schema import Resilience

STARTING, FIRST_STEP, RESTING = "starting", "first step", "ending"
_START = {
    STARTING: "start_timeout_seconds",
    "importing megatron-core": "start_timeout_seconds",
    "verifying the checkpoint": "load_timeout_seconds",
    "preparing data": "data_timeout_seconds",
    "connecting ranks": "start_timeout_seconds",
    "building the model": "start_timeout_seconds",
    "loading the checkpoint": "load_timeout_seconds",
    FIRST_STEP: "first_step_timeout_seconds",
}
"""Phases of a start in their order -> the key of `resilience` with their limit."""
_LATER = {
    "waiting for data": "step_timeout_seconds",
    "forward and backward": "step_timeout_seconds",
    "update": "step_timeout_seconds",
    "agreement with the other ranks": "step_timeout_seconds",
    "evaluation": "evaluation_timeout_seconds",
    "saving": "save_timeout_seconds",
}
DATA, FORWARD_AND_BACKWARD, UPDATE, AGREEMENT, EVALUATION, SAVING = _LATER
PHASES = (*_START, *_LATER, RESTING)
_PAGE, _BEAT, _LENGTH = 16384, struct.Struct("<qqqd"), struct.Struct("<q")
"""A beat: its number, the index of its phase, its step, its limit in seconds. Then length and text of what was told."""


def limits(resilience: Resilience) -> dict[str, float]:
    """Seconds that each phase may take; infinite where the key is 0.

    While ranks start, one waits for others that are still in an earlier phase, in its first step too. So each phase of
    a start gets at least the time of every one before it.
    """
    phases = _START | _LATER
    own = {phase: float(getattr(resilience, key) or math.inf) for phase, key in phases.items()}
    starting = itertools.accumulate((own[phase] for phase in _START), max)
    return {**own, **dict(zip(_START, starting, strict=True)), RESTING: math.inf}


def collective_timeout_seconds(resilience: Resilience) -> int:
    """How long a collective may take: longer than any phase unless the user says otherwise.

    The collective's own timeout ends the ranks that wait, and not the one that they wait for, so it comes second: it is
    for what the watch does not see.
    """
    finite = [limit for limit in limits(resilience).values() if math.isfinite(limit)]
    return resilience.distributed_timeout_seconds or math.ceil(1.2 * max(finite, default=3000.0))


class Heartbeat:
    """One rank's page: the rank writes, its guardian reads."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _PAGE)
        self._limits: dict[str, float] = dict.fromkeys(PHASES, math.inf)
        self._count, self._step, self._first_step = 0, 0, 0

    def begin(self, limits_seconds: dict[str, float], **told: Any) -> None:
        """Let the guardian watch from now on.

        Args:
            limits_seconds: of every phase, see `limits`.
            **told: plain values that the guardian is to know.
        """
        text = json.dumps(told).encode()
        start = _BEAT.size + _LENGTH.size
        self._page[start : start + len(text)] = text
        _LENGTH.pack_into(self._page, _BEAT.size, len(text))
        self._limits = limits_seconds
        self.beat(STARTING)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Say what begins now.

        Args:
            phase: one of `PHASES`.
            step: number of the update that it belongs to; None for that of the beat before.
        """
        self._count, self._step = self._count + 1, self._step if step is None else step
        self._first_step = self._first_step or self._step
        limit = self._limits[phase]
        if self._step and self._step == self._first_step and phase != RESTING:
            limit = max(limit, self._limits[FIRST_STEP])
        _BEAT.pack_into(self._page, 0, self._count, PHASES.index(phase), self._step, limit)

    def rest(self) -> None:
        """What follows is not watched."""
        self.beat(RESTING)

    def read(self) -> tuple[int, str, int, float]:
        """The guardian: number of the last beat (0 before the first), its phase, its step, its limit in seconds."""
        count, phase, step, limit = _BEAT.unpack_from(self._page)
        return count, PHASES[phase], step, limit

    def told(self) -> dict[str, Any]:
        """The guardian: what `begin` was given."""
        (length,) = _LENGTH.unpack_from(self._page, _BEAT.size)
        start = _BEAT.size + _LENGTH.size
        content: dict[str, Any] = json.loads(self._page[start : start + length])
        return content
