"""Random tokens for benchmarks: no disk, no lock, no preparation; the model has nothing to learn from them.

A sample is a pure function of seed and index: Philox is a counter-based generator, so sample 10**9 costs what sample 0
does.
"""

import sys

import numpy
import torch

from shardwright.data.stream import Sample


class MockTokens:
    """An epoch that never ends, of tokens drawn evenly from [0, vocab_size).

    Args:
        seed: any integers; two datasets with equal ones are equal.
        vocab_size: bound of the token ids.
        seq_length: tokens of one sample.
    """

    def __init__(self, seed: tuple[int, ...], *, vocab_size: int, seq_length: int) -> None:
        self._key = numpy.random.SeedSequence(seed).generate_state(2, numpy.uint64)
        self._vocab_size = vocab_size
        self._seq_length = seq_length

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Sample:
        # the low 64 bits of the counter run inside a sample, the next 64 number it
        generator = numpy.random.Generator(numpy.random.Philox(key=self._key, counter=index << 64))
        drawn = torch.from_numpy(generator.integers(self._vocab_size, size=self._seq_length + 1))
        return {
            "tokens": drawn[:-1],
            "labels": drawn[1:],
            "loss_mask": torch.ones(self._seq_length),
            "position_ids": torch.arange(self._seq_length),
        }
