"""Whether the loss is where it was lately: a decaying mean, and since when the loss lies far above it. No torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

WARMUP_STEPS, DECAY = 20, 0.95
"""Steps before a loss can be a spike, and what a step leaves of the mean."""


@dataclass(frozen=True, slots=True)
class Spikes:
    """After a step; equal on all ranks, and part of a checkpoint."""

    mean: float | None = None
    """Decaying mean of the losses that were no spikes."""
    number: int = 0
    """Losses in it."""
    high: int = 0
    """Steps in a row whose loss was a spike or not finite."""
    since: int = 0
    """The first of them."""

    def after_step(self, loss: float, step: int, factor: float, *, finite: bool = True) -> Self:
        """Take in one step.

        Args:
            loss: of the step.
            step: its number.
            factor: a loss above so many times the mean is a spike.
            finite: whether everything in the step was finite.
        """
        finite = finite and math.isfinite(loss)
        if not finite or (self.number >= WARMUP_STEPS and loss > factor * (self.mean or 0.0)):
            return replace(self, high=self.high + 1, since=self.since if self.high else step)
        mean = loss if self.mean is None else DECAY * self.mean + (1 - DECAY) * loss
        return replace(self, mean=mean, number=self.number + 1, high=0, since=0)

    def to_json(self) -> dict[str, Any]:
        """As written into a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """What `to_json` gave; of a checkpoint without it one that knows nothing."""
        return cls(**saved)
