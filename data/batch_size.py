"""How many samples a step takes: a pure function of the samples consumed before it, so nothing is saved of it.

A ramp `[start, increment, samples]` raises the batch size from `start` by `increment` to `data.global_batch_size` over
the first `samples` samples, in equal shares of them. It is the rule of `--rampup-batch-size`, in whole numbers.
Source: megatron-core 0.16.1, num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator. In its place
0.19.2 has stages, as `BatchSizes` has them (StepBatchsizeNumMicroBatchesCalculator), and ignores a ramp.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from shardwright.conf.schema import Data


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Global batch size over the samples of a run.

    Args:
        stages: (consumed samples, batch size) ascending; a size holds from its number of consumed samples on. The first
            number is 0.
    """

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, batch_size: int) -> "BatchSizes":
        """The same batch size always."""
        return cls(((0, batch_size),))

    @classmethod
    def of(cls, data: Data) -> "BatchSizes":
        """The batch sizes of training by a configuration whose ramp the rules have passed."""
        if data.rampup_batch_size is None:
            return cls.constant(data.global_batch_size)
        start, increment, samples = data.rampup_batch_size
        num_increments = (data.global_batch_size - start) // increment
        return cls(tuple((-(-i * samples // num_increments), start + i * increment) for i in range(num_increments + 1)))

    def at(self, consumed_samples: int) -> int:
        """Samples of the step before which `consumed_samples` were consumed."""
        return self.stages[bisect_right(self.stages, consumed_samples, key=lambda stage: stage[0]) - 1][1]

    def steps(self, consumed_samples: int, num_steps: int) -> Iterator[int]:
        """Batch sizes of the next `num_steps` steps."""
        for _ in range(num_steps):
            batch_size = self.at(consumed_samples)
            yield batch_size
            consumed_samples += batch_size

    def consumed_after(self, num_steps: int, consumed_samples: int = 0) -> int:
        """Samples consumed when `num_steps` more steps are done; counted by stages and not by steps."""
        for (_, batch_size), (end, _) in pairwise(self.stages):
            taken = min(num_steps, _steps_over(end - consumed_samples, batch_size))
            consumed_samples += taken * batch_size
            num_steps -= taken
        return consumed_samples + num_steps * self.stages[-1][1]

    def steps_to(self, num_samples: int) -> int:
        """The fewest steps of a run that consume `num_samples` samples."""
        num_steps = consumed_samples = 0
        for (_, batch_size), (end, _) in pairwise((*self.stages, (num_samples, 0))):
            taken = _steps_over(min(end, num_samples) - consumed_samples, batch_size)
            consumed_samples += taken * batch_size
            num_steps += taken
        return num_steps


def _steps_over(num_samples: int, batch_size: int) -> int:
    return max(0, -(-num_samples // batch_size))
