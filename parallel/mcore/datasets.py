"""megatron-core's GPTDataset for one epoch of one split, built once and shared through the cache.

megatron-core itself writes its index files one by one under their final names, and takes whatever stands there for
whole. So the first process to come builds them in a partial folder under a lock, and every process then opens the
committed one. Every epoch has a seed of its own; why, says `data/stream.py`.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from shardwright.data.cache import build_once
from shardwright.data.corpus import SPLITS, Corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class _CorpusTokenizer:
    """What megatron-core asks a tokenizer for when the tokens already are on disk."""

    eod: int
    vocab_size: int
    unique_identifiers: dict[str, str] = field(default_factory=dict)
    """Goes into the name of the index files."""


def gpt_epoch(corpus: Corpus, split: str, *, seq_length: int, seed: int, epoch: int, cache_dir: Path) -> GPTDataset:
    """The samples of one pass over a split: documents shuffled, laid end to end, cut, and the pieces shuffled.

    Samples reach over the ends of documents; positions and attention are not reset there and the end-of-document token
    is learned like any other. Every epoch of a split has `corpus.samples_per_epoch` samples.

    Every rank calls this, and before a process group exists: with one, megatron-core would let rank 0 alone build.

    Args:
        corpus: from `data.corpus.prepare`, which has checked the sizes of its files.
        split: train, validation or test.
        seq_length: tokens of one sample.
        seed: seed of the run.
        epoch: number of the pass, from 0; another order each.
        cache_dir: folder of the index files, shared by runs.

    Raises:
        RefusedError: the split has not enough text for one sample; the cache cannot be written.
    """
    assert not torch.distributed.is_initialized(), "the samples are built before the process group"
    num_samples = corpus.samples_per_epoch(split, seq_length)
    first, end = corpus.splits[split]

    def dataset(folder: Path) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=_order_seed(seed, split, epoch),
            sequence_length=seq_length,
            blend=([corpus.digest], None),
            split="1,0,0",  # of no effect: the documents are given below
            path_to_cache=str(folder),
            tokenizer=_CorpusTokenizer(eod=corpus.eod_token, vocab_size=corpus.vocab_size),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = corpus.documents(split).astype(numpy.int32)
        return GPTDataset(_tokens(corpus.prefix), corpus.digest, documents, None, Split.train, config)

    name = f"{split}-{first}-{end}-length{seq_length}-seed{seed}-epoch{epoch}"
    built = dataset(build_once(cache_dir / f"{corpus.digest}-samples" / name, dataset))
    assert len(built) == num_samples, f"megatron-core made {len(built)} samples, not {num_samples}"
    return built


@cache
def _tokens(prefix: Path) -> IndexedDataset:
    """One memory map of the tokens for all epochs and splits of this process."""
    return IndexedDataset(str(prefix))


def _order_seed(seed: int, split: str, epoch: int) -> int:
    """A 32-bit seed; hashed, so that epoch 1 of seed 1 is not epoch 0 of seed 2."""
    return int(numpy.random.SeedSequence((seed, SPLITS.index(split), epoch)).generate_state(1)[0])
