"""How much of a run's time trains, given that machines fail (effective training time ratio, ETTR), and what to change.

Failures come at random, at one rate per GPU, and any of them stops the whole run; a restart costs the same each time
and may fail like everything else. The expected time from one save to the next is then exact (Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps", eq. 20), and with it

    ETTR = t / (M e^(R/M) (e^((t + s)/M) - 1))

of t seconds of training between saves, s seconds that training waits for a save, R seconds from a failure to the next
step, and M seconds between failures of the whole run. The best t is Daly's: sqrt(2 s M) (1 + sqrt(s/2M)/3 + s/18M) - s.
What an asynchronous save still writes while training goes on is not counted as lost.

Unless a site knows better (`cluster.failures_per_gpu_day`), machines fail as often as those that trained Llama 3 405B:
466 interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.4).
"""

import math
from dataclasses import dataclass, replace

from shardwright.conf.schema import Config

SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """What is assumed of a run, and what follows."""

    gpus: int
    failures_per_gpu_day: float
    restart_seconds: float
    save_stall_seconds: float
    step_seconds: float
    """Estimated from the FLOPs of a step, the GPU's peak and `cluster.mfu`."""
    save_interval: int
    """Steps between saves."""

    @property
    def seconds_between_failures(self) -> float:
        """Of the whole run: M."""
        return SECONDS_PER_DAY / (self.failures_per_gpu_day * self.gpus)

    @property
    def ettr(self) -> float:
        """Share of all time in which steps are trained that count; 0 where no interval is ever completed."""
        mean, trained = self.seconds_between_failures, self.save_interval * self.step_seconds
        try:
            segment = mean * math.exp(self.restart_seconds / mean)
            return trained / (segment * math.expm1((trained + self.save_stall_seconds) / mean))
        except OverflowError:
            return 0.0

    def best(self) -> "Reliability":
        """The same with the save interval that trains most."""
        mean, stall = self.seconds_between_failures, self.save_stall_seconds
        half = stall / (2 * mean)
        seconds = mean if half >= 1 else math.sqrt(2 * stall * mean) * (1 + math.sqrt(half) / 3 + half / 9) - stall
        return replace(self, save_interval=max(1, round(seconds / self.step_seconds)))

    def varied(self, *, interval: float = 1.0, restart: float = 1.0) -> "Reliability":
        """The same with a save interval and a time to restart that are so many times as long."""
        return replace(
            self,
            save_interval=max(1, round(self.save_interval * interval)),
            restart_seconds=self.restart_seconds * restart,
        )


def of(config: Config, *, step_flops: float, peak: float | None) -> Reliability | None:
    """What is expected of a run; None where its GPU is not known, or where it never fails or never saves.

    Args:
        config: the run.
        step_flops: of the whole world, forward and backward.
        peak: of one GPU, FLOP/s in BF16.
    """
    cluster, interval = config.cluster, config.checkpoint.save_interval
    if peak is None or cluster.failures_per_gpu_day == 0 or interval == 0:
        return None
    return Reliability(
        gpus=config.world_size,
        failures_per_gpu_day=cluster.failures_per_gpu_day,
        restart_seconds=cluster.restart_seconds,
        save_stall_seconds=cluster.save_stall_seconds,
        step_seconds=step_flops / (config.world_size * peak * cluster.mfu),
        save_interval=interval,
    )
