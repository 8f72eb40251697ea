"""The endless stream of training samples, made of epochs: stream index -> (epoch, offset in it).

megatron-core shuffles all the samples it is asked for at once, so that a run made longer would see other samples from
the start. Here every epoch is a dataset of its own, shuffled by its own seed: a longer run only adds epochs at the end,
and the first K samples of any two runs are the same.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

type Sample = dict[str, Tensor]
"""One sequence, all [seq_length]: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32."""


class TokenDataset(Protocol):
    """Samples by index; equal at every call and in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class Stream:
    """The first `num_samples` samples of the endless stream.

    All epochs that they need are built here and now, so that loader workers only ever read. A pass over the samples of
    an epoch is complete before the next one starts; a batch may reach over the border.

    Args:
        build_epoch: epoch (from 0) to its dataset; all epochs have the same number of samples, at least one.
        num_samples: length of the stream; `sampler.samples_needed` counts it.
    """

    def __init__(self, build_epoch: Callable[[int], TokenDataset], num_samples: int) -> None:
        first = build_epoch(0)
        self.samples_per_epoch = len(first)
        self._num_samples = num_samples
        num_epochs = -(-num_samples // self.samples_per_epoch)
        self._epochs = [first, *(build_epoch(epoch) for epoch in range(1, num_epochs))]
        assert all(len(epoch) == self.samples_per_epoch for epoch in self._epochs), "epochs of different lengths"

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of a stream of {self._num_samples}")
        epoch, offset = divmod(index, self.samples_per_epoch)
        return self._epochs[epoch][offset]
