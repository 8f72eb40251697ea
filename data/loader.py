"""From the stream to the tensors of a step: one item per optimizer step, one dict per micro-batch.

Iterating leaves the random state of the training process alone: torch's loader would draw a seed for its workers from
the global generator, and a run that resumes, which starts its workers at another step, would then see another dropout
than the run that never stopped. So it gets a generator of its own. The samples are no function of a worker's random
state either, and torch keeps them in order, so the number of workers changes nothing but the speed.
"""

import ctypes
import itertools
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset

from shardwright.data.batch_size import BatchSizes
from shardwright.data.sampler import DataPosition, micro_batches, samples_needed, step_samples
from shardwright.data.stream import Sample, Stream

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl(2): the signal that a process gets when the thread that started it ends."""

type Batch = dict[str, torch.Tensor]
"""One micro-batch: the tensors of `Sample`, each with a first axis of `micro_batch_size`."""


def batches(
    stream: Stream,
    position: DataPosition,
    *,
    batch_sizes: BatchSizes,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int,
    num_steps: int,
) -> Generator[list[Batch], None, None]:
    """Load this rank's share of `num_steps` steps from `position` on; advancing the position is the caller's business.

    Workers start at the first item and end with the iterator: when it is exhausted, closed or dropped.

    Args:
        stream: long enough for all steps (`sampler.samples_needed`).
        position: where the first step starts.
        batch_sizes: samples of each step over all ranks.
        micro_batch_size: samples of one forward pass.
        dp_rank, dp_size: this rank's place on the data-parallel axis; ranks of one place (TP, PP) load the same.
        num_workers: loader processes; 0 loads in this one.
        num_steps: steps until the iterator ends.

    Returns:
        An iterator of steps, each a list of `batch size / (micro_batch_size * dp_size)` micro-batches on the CPU
        (pinned where CUDA is present).
    """
    assert samples_needed(position, batch_sizes, num_steps) <= len(stream), "the stream is too short"
    sizes = partial(batch_sizes.steps, position.consumed_samples, num_steps)

    def indices() -> Iterator[list[int]]:
        place = position
        for size in sizes():
            yield from micro_batches(step_samples(place, size), micro_batch_size, dp_rank, dp_size)
            place = place.consume(size)

    loader = DataLoader(
        cast("Dataset[Sample]", stream),
        batch_sampler=indices(),
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=partial(_start_worker, os.getpid()),
    )
    return _steps(loader, (size // (micro_batch_size * dp_size) for size in sizes()))


def _steps(loader: "DataLoader[Sample]", num_microbatches: Iterable[int]) -> Generator[list[Batch], None, None]:
    """Group micro-batches into steps."""
    loaded = iter(loader)
    try:
        for number in num_microbatches:
            yield list(itertools.islice(loaded, number))
    finally:
        del loaded  # its last reference: torch ends the workers


def _collate(samples: list[Sample]) -> Batch:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _start_worker(loading_process: int, worker: int) -> None:
    """Tie a worker's life to the process that it loads for.

    torch's workers look every five seconds whether their parent changed, but one that is killed before their first
    look, while they start, is never missed. So the kernel ends them with their parent, and at once. Ctrl-C reaches
    every process of the terminal; the rank decides what it means, and ends its workers.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != loading_process:  # it died before the call above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
