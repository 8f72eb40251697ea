"""Which samples a step consumes: pure functions of the data position, the same for every layout.

The stream is the endless sequence 0, 1, 2, ... of sample indices. A run's place in it is `DataPosition`: how many
samples it consumed, and which ranges it passes over. Nothing else is needed to resume: a step takes as many of the next
indices as its batch size says, whatever the number of ranks, and the ranks share them out. So a run that resumes with
another data-parallel size or batch size neither repeats nor misses a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.data.batch_size import BatchSizes


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Place in the sample stream.

    Args:
        consumed_samples: samples that training consumed; the k-th consumed one (from 0) is the k-th stream index that
            lies in no skipped range.
        skipped: stream indices [first, end) that are never consumed; ascending, apart, none empty.
    """

    consumed_samples: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        bounds = [bound for skipped in self.skipped for bound in skipped]
        if self.consumed_samples < 0 or any(a >= b for a, b in zip([-1, *bounds], bounds, strict=False)):
            raise ValueError(f"not a data position: {self.consumed_samples} consumed, skipped {self.skipped}")

    def stream_index(self, offset: int = 0) -> int:
        """Stream index of the sample that is consumed after `offset` more."""
        index = self.consumed_samples + offset
        for first, end in self.skipped:
            if index < first:
                break
            index += end - first
        return index

    def consume(self, num_samples: int) -> "DataPosition":
        """The position after `num_samples` more."""
        return replace(self, consumed_samples=self.consumed_samples + num_samples)

    def skip(self, num_samples: int) -> "DataPosition":
        """The position that passes over the next `num_samples` samples.

        A range is only ever added here, at the present index: one added behind it would move every later index.
        """
        first = self.stream_index()
        earlier = self.skipped
        assert all(end <= first for _, end in earlier), f"skipped ranges {earlier} lie ahead of {first}"
        end = first + num_samples
        if earlier and earlier[-1][1] == first:
            first, earlier = earlier[-1][0], earlier[:-1]
        return replace(self, skipped=(*earlier, (first, end)))


def step_samples(position: DataPosition, batch_size: int) -> list[int]:
    """Stream indices of the samples that the next step consumes, in order."""
    return [position.stream_index(offset) for offset in range(batch_size)]


def samples_needed(position: DataPosition, batch_sizes: BatchSizes, num_steps: int) -> int:
    """Length of a stream that `num_steps` more steps can be taken from."""
    consumed = position.consumed_samples
    num_samples = batch_sizes.consumed_after(num_steps, consumed) - consumed
    return position.stream_index(num_samples - 1) + 1 if num_samples else 0


def micro_batches(samples: Sequence[int], micro_batch_size: int, dp_rank: int, dp_size: int) -> list[list[int]]:
    """What one data-parallel rank computes of a step, in megatron-core's order.

    Micro-batch m of all ranks is `samples[m * micro_batch_size * dp_size :][: micro_batch_size * dp_size]`; a rank has
    the `dp_rank`-th piece of it.

    Returns:
        Indices [num_microbatches][micro_batch_size].
    """
    wide = micro_batch_size * dp_size
    assert 0 <= dp_rank < dp_size, f"dp_rank {dp_rank} of {dp_size}"
    assert len(samples) % wide == 0, f"{len(samples)} samples do not fill micro-batches of {wide} on all ranks"
    starts = range(dp_rank * micro_batch_size, len(samples), wide)
    return [list(samples[start : start + micro_batch_size]) for start in starts]
