"""A rank's training and validation data: sources of `data`, epochs of megatron-core, share of the layout."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shardwright.conf.schema import Config, DataSource
from shardwright.data import corpus as corpora
from shardwright.data.loader import Batch, batches
from shardwright.data.mock import MockTokens
from shardwright.data.sampler import DataPosition, samples_needed
from shardwright.data.stream import Stream, TokenDataset
from shardwright.pretrain.plan import Plan


class Streams:
    """Builds the sample streams that a run still needs; before the process group exists, in every rank.

    Args:
        plan: the run.
        rank: global rank.
        position: data position of step `step`.
        step: optimizer steps that are done.

    Raises:
        RefusedError: the source has not enough text for training, or for the evaluation that the run asks for.
    """

    def __init__(self, plan: Plan, rank: int, position: DataPosition, step: int) -> None:
        config, schedule = plan.config, plan.config.schedule
        self._position, self._num_workers = position, config.data.num_workers
        self._steps, self._eval_steps = max(0, schedule.train_iters - step), schedule.eval_iters
        self._share = partial(
            batches,
            global_batch_size=plan.batch.global_batch_size,
            micro_batch_size=plan.batch.micro_batch_size,
            dp_rank=plan.layout.coordinates(rank).dp,
            dp_size=plan.layout.dp,
        )
        build = _epoch_builder(config)
        self.train = Stream(
            partial(build, "train"), samples_needed(position, plan.batch.global_batch_size, self._steps)
        )
        self.validation = None
        if schedule.eval_interval and schedule.eval_iters:
            self.validation = Stream(
                partial(build, "validation"), schedule.eval_iters * plan.batch.global_batch_size
            )

    def training(self) -> Iterator[list[Batch]]:
        """The rest of the run, an item per optimizer step."""
        return self._share(self.train, self._position, num_workers=self._num_workers, num_steps=self._steps)

    def evaluation(self) -> Iterator[list[Batch]]:
        """The first `eval_iters` global batches of the validation split, the same at every call."""
        assert self.validation is not None, "the run evaluates never"
        return self._share(self.validation, DataPosition(), num_workers=0, num_steps=self._eval_steps)


def _epoch_builder(config: Config) -> Callable[[str, int], TokenDataset]:
    """split, epoch → dataset of one pass."""
    data, seed = config.data, config.run.seed
    if data.source is DataSource.mock:
        return lambda split, epoch: MockTokens(
            (seed, corpora.SPLITS.index(split), epoch), vocab_size=data.vocab_size, seq_length=data.seq_length
        )
    from shardwright.parallel.mcore.datasets import gpt_epoch

    corpus = corpora.prepare(data)
    return lambda split, epoch: gpt_epoch(
        corpus, split, seq_length=data.seq_length, seed=seed, epoch=epoch, cache_dir=Path(data.cache_dir).absolute()
    )
