"""Which layers leave FP8 for BF16 when a run gets into trouble, and when they come back: arithmetic without torch.

Every rank computes the same decision from the same numbers (the loss of the step, whether it was finite, and what rank
0 told all of a sample), so nobody has to agree on anything. A decision is part of the trainer state in checkpoints.

A layer is demoted

* at a sample, if one of its operands overflows or underflows in more than the limits' shares;
* after a loss spike or an update that was not finite, if it is among the worst of the next sample: `resilience.
  fp8_guard_share` of the layers, by the operand that keeps least of its signal;
* at once, if it quantised a NaN or an infinity.

It comes back at a sample at which it would be within half of the limits, at the earliest `fp8_guard_steps` steps later,
and each time it is demoted again twice as many. Half and twice are the hysteresis: no layer toggles at the limit.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.conf.schema import Resilience
from shardwright.pretrain.spikes import Spikes

WITHIN = 0.5
"""Share of a limit below which a layer may come back."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One operand of one layer at a sampled step, as rank 0 told all ranks."""

    layer: str
    operand: str
    overflow: float
    underflow: float
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class Demotion:
    """One layer's time in BF16."""

    since: int
    """Step of the last demotion."""
    times: int
    """How often it was demoted so far."""
    back: bool = False
    """Whether it computes in the narrow format again."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What the guard knows after a step; equal on all ranks, and part of a checkpoint."""

    demotions: Mapping[str, Demotion] = field(default_factory=dict)
    losses: Spikes = field(default_factory=Spikes)
    trouble: str = ""
    """What the next sample is to find the layers for; empty without trouble."""

    @property
    def in_bf16(self) -> list[str]:
        """Layers that the guard keeps in BF16."""
        return sorted(name for name, demotion in self.demotions.items() if not demotion.back)

    def after_step(
        self, loss: float, *, finite: bool, bad_layers: Collection[str], step: int, how: Resilience
    ) -> "Guard":
        """Take in one step.

        Args:
            loss: of the step.
            finite: whether loss, gradient norm and all that was quantised were.
            bad_layers: layers that quantised something that was not.
            step: its number.
            how: limits.
        """
        guard = self._demoted(sorted(set(bad_layers)), step)
        losses = self.losses.after_step(loss, step, how.fp8_guard_spike, finite=finite)
        guard = replace(guard, losses=losses)
        if not losses.high:
            return guard
        if not (finite and math.isfinite(loss)):
            return guard if bad_layers else replace(guard, trouble=f"an update that was not finite at step {step}")
        return replace(guard, trouble=f"loss {loss:.4g} at step {step}, after a mean of {losses.mean:.4g}")

    def after_sample(self, samples: Iterable[Sample], step: int, how: Resilience) -> "Guard":
        """Take in a sample: demote what is beyond the limits or to blame, let come back what is well."""
        worst: dict[str, tuple[float, float, float]] = {}
        for sample in samples:
            quality = math.inf if sample.sqnr_db is None else sample.sqnr_db
            known = worst.get(sample.layer, (0.0, 0.0, math.inf))
            worst[sample.layer] = (
                max(known[0], sample.overflow),
                max(known[1], sample.underflow),
                min(known[2], quality),
            )
        narrow = [name for name in sorted(worst) if name not in self.in_bf16]
        beyond = [name for name in narrow if not _within(worst[name], how, 1.0)]
        if self.trouble:
            number = max(1, round(how.fp8_guard_share * len(worst)))
            beyond += [name for name in sorted(narrow, key=lambda name: worst[name][2])[:number] if name not in beyond]
        guard = replace(self._demoted(beyond, step), trouble="")
        recovered = [
            name
            for name in self.in_bf16
            if name in worst and _within(worst[name], how, WITHIN) and step >= self._earliest(name, how)
        ]
        back = {name: replace(self.demotions[name], back=True) for name in recovered}
        return replace(guard, demotions={**guard.demotions, **back})

    def _earliest(self, name: str, how: Resilience) -> int:
        demotion = self.demotions[name]
        return int(demotion.since + how.fp8_guard_steps * 2 ** (demotion.times - 1))

    def _demoted(self, names: Collection[str], step: int) -> "Guard":
        new = {
            name: Demotion(since=step, times=self.demotions[name].times + 1 if name in self.demotions else 1)
            for name in names
            if name not in self.in_bf16
        }
        return replace(self, demotions={**self.demotions, **new}) if new else self

    def to_json(self) -> dict[str, Any]:
        """As written into a checkpoint."""
        demotions = {name: [each.since, each.times, each.back] for name, each in self.demotions.items()}
        return {"demotions": demotions, "losses": self.losses.to_json(), "trouble": self.trouble}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Guard":
        """What `to_json` gave; of a checkpoint without it a guard that knows nothing."""
        if not saved:
            return cls()
        demotions = {name: Demotion(*values) for name, values in saved["demotions"].items()}
        return cls(demotions, Spikes.from_json(saved["losses"]), saved["trouble"])


def _within(worst: tuple[float, float, float], how: Resilience, share: float) -> bool:
    overflow, underflow, _ = worst
    return overflow <= share * how.fp8_guard_overflow and underflow <= share * how.fp8_guard_underflow
