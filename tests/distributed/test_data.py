"""From the corpus to a step's tensors, with torch and megatron-core: order, prefix, layout and resume, workers."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from shardwright.conf.choices import DataSource
from shardwright.conf.problems import RefusedError
from shardwright.conf.schema import Data
from shardwright.data.batch_size import BatchSizes
from shardwright.data.corpus import Corpus, split_documents
from shardwright.data.indexed import open_indexed, write_indexed
from shardwright.data.loader import batches
from shardwright.data.mock import MockTokens
from shardwright.data.sampler import DataPosition
from shardwright.data.source import Source
from shardwright.data.stream import Stream
from shardwright.parallel.mcore.datasets import gpt_epoch

SEQ_LENGTH = 16
NUM_DOCUMENTS = 40
SPLIT = (32, 4, 4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Documents of 1 to 49 random tokens."""
    prefix = tmp_path_factory.mktemp("cache") / "digest" / "tokens"
    prefix.parent.mkdir()
    generator = numpy.random.default_rng(3)
    lengths = generator.integers(1, 50, size=NUM_DOCUMENTS)
    documents = ((str(n), generator.integers(1, 500, size=length).tolist()) for n, length in enumerate(lengths))
    written = write_indexed(prefix, documents, vocab_size=512, eod_token=0)
    splits = split_documents(NUM_DOCUMENTS, SPLIT)
    sizes = open_indexed(prefix).lengths
    return Corpus(
        prefix=prefix,
        tokenizer=prefix,
        num_documents=written.num_documents,
        num_tokens=written.num_tokens,
        eod_token=0,
        vocab_size=512,
        tokens_sha256="",
        skipped={},
        splits=splits,
        split_tokens={name: int(sizes[first:end].sum()) for name, (first, end) in splits.items()},
        in_random_order=True,
    )


def open_epoch(corpus: Corpus, split: str = "train", *, seed: int = 1, epoch: int = 0, seq_length: int = SEQ_LENGTH):
    return gpt_epoch(
        corpus, split, seq_length=seq_length, seed=seed, epoch=epoch, cache_dir=corpus.prefix.parent.parent
    )


def rows(dataset) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def stream_of(corpus: Corpus, num_samples: int) -> Stream:
    return Stream(lambda epoch: open_epoch(corpus, epoch=epoch), num_samples)


def tokens_of(steps) -> list[list[int]]:
    return [sample for step in steps for batch in step for sample in batch["tokens"].tolist()]


def load(stream: Stream, position: DataPosition, num_steps: int, **changes):
    layout = {"micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "num_workers": 0} | changes
    return batches(stream, position, batch_sizes=BatchSizes.constant(4), num_steps=num_steps, **layout)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.05)
    return bool(condition())


def test_megatron_core_reads_what_we_write(corpus):
    ours, theirs = open_indexed(corpus.prefix), IndexedDataset(str(corpus.prefix))
    assert len(ours) == len(theirs) == NUM_DOCUMENTS
    assert theirs.document_indices.tolist() == list(range(NUM_DOCUMENTS + 1))
    for number in range(NUM_DOCUMENTS):
        assert theirs[number].dtype == ours.tokens(number).dtype
        assert theirs[number].tolist() == ours.tokens(number).tolist()


def test_a_sample_is_consecutive_tokens_with_their_successors_as_labels(corpus):
    dataset = open_epoch(corpus)
    sample = dataset[3]
    assert {name: (t.dtype, t.shape) for name, t in sample.items()} == {
        "tokens": (torch.int64, (SEQ_LENGTH,)),
        "labels": (torch.int64, (SEQ_LENGTH,)),
        "loss_mask": (torch.float32, (SEQ_LENGTH,)),
        "position_ids": (torch.int64, (SEQ_LENGTH,)),
    }
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
    assert sample["loss_mask"].tolist() == [1.0] * SEQ_LENGTH
    assert sample["position_ids"].tolist() == list(range(SEQ_LENGTH))


@pytest.mark.parametrize("in_random_order", [True, False])
def test_an_epoch_reads_the_documents_of_its_split_alone_and_each_token_at_most_once(corpus, in_random_order, tmp_path):
    opened = open_indexed(corpus.prefix)
    corpus = replace(corpus, in_random_order=in_random_order)
    tokens = {split: int(opened.lengths[corpus.documents(split)].sum()) for split in corpus.splits}
    corpus = replace(corpus, split_tokens=tokens)
    for split in corpus.splits:
        documents = [opened.tokens(number) for number in corpus.documents(split)]
        allowed = numpy.bincount(numpy.concatenate(documents), minlength=512)
        dataset = gpt_epoch(corpus, split, seq_length=SEQ_LENGTH, seed=1, epoch=0, cache_dir=tmp_path)
        read = numpy.bincount(numpy.concatenate(rows(dataset)), minlength=512)
        assert (read <= allowed).all()
        assert 0 <= allowed.sum() - read.sum() <= SEQ_LENGTH
        assert len(dataset) == corpus.samples_per_epoch(split, SEQ_LENGTH)


def test_epochs_and_seeds_have_orders_of_their_own_and_the_same_length(corpus):
    orders = [rows(open_epoch(corpus, seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert len({len(order) for order in orders}) == 1
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert rows(open_epoch(corpus, seed=1, epoch=1)) == orders[1]


def test_another_split_of_the_same_corpus_does_not_meet_the_cached_samples(corpus):
    whole = open_epoch(corpus)
    splits = split_documents(NUM_DOCUMENTS, (20, 10, 10))
    tokens = open_indexed(corpus.prefix).lengths[slice(*splits["train"])].sum()
    other = replace(corpus, splits=splits, split_tokens={"train": int(tokens)})
    assert len(open_epoch(other)) == other.samples_per_epoch("train", SEQ_LENGTH) < len(whole)


def test_the_samples_of_an_epoch_are_built_once_and_committed_whole(corpus):
    first = rows(open_epoch(corpus, seed=7))
    (folder,) = (corpus.prefix.parent.parent / "digest-samples").glob("train-*-seed7-epoch0")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(before) == 4
    assert rows(open_epoch(corpus, seed=7)) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_split_without_text_for_one_sample_is_refused(corpus):
    with pytest.raises(RefusedError, match=r"validation: 4 documents of 40; need 1001 tokens"):
        open_epoch(corpus, "validation", seq_length=1000)


def test_a_longer_run_keeps_the_prefix_of_a_shorter_one(corpus):
    epoch = corpus.samples_per_epoch("train", SEQ_LENGTH)
    short, long = (rows(stream_of(corpus, num_samples)) for num_samples in (epoch + 3, 3 * epoch + 1))
    assert long[: len(short)] == short
    assert long[:epoch] != long[epoch : 2 * epoch]
    with pytest.raises(IndexError):
        stream_of(corpus, epoch)[epoch]


def test_the_stream_of_a_configuration_comes_from_its_corpus_or_from_nothing_but_the_seed(tmp_path):
    data = Data(
        source=DataSource.mock,
        files=None,
        text_key=None,
        tokenizer=None,
        eod_token=None,
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        global_batch_size=4,
        rampup_batch_size=None,
        cache_dir=str(tmp_path / "cache"),
        vocab_size=512,
        split=list(SPLIT),
        num_workers=0,
    )
    source = Source(data, seed=1, build_epoch=gpt_epoch)
    train, validation = source.stream("train", 6), source.stream("validation", 6)
    assert rows(train) == rows(source.stream("train", 9))[:6] != rows(validation)
    assert not (tmp_path / "cache").exists()


def test_mock_samples_are_a_function_of_seed_and_index():
    make = MockTokens((1, 0), vocab_size=50, seq_length=SEQ_LENGTH)
    again = MockTokens((1, 0), vocab_size=50, seq_length=SEQ_LENGTH)
    assert again[10**12]["tokens"].tolist() == make[10**12]["tokens"].tolist()
    drawn = torch.stack([make[i]["tokens"] for i in range(200)])
    assert (int(drawn.min()), int(drawn.max())) == (0, 49)
    assert len(set(map(tuple, drawn.tolist()))) == 200
    assert MockTokens((2, 0), vocab_size=50, seq_length=SEQ_LENGTH)[0]["tokens"].tolist() != drawn[0].tolist()
    assert make[0]["labels"][:-1].tolist() == make[0]["tokens"][1:].tolist()


def test_a_step_is_its_micro_batches_with_the_samples_of_the_position(corpus):
    stream = stream_of(corpus, 30)
    steps = list(load(stream, DataPosition(6, ((1, 3),)), 2))
    assert [[batch["tokens"].shape for batch in step] for step in steps] == [[(2, SEQ_LENGTH)] * 2] * 2
    assert tokens_of(steps) == rows(stream)[8:16]
    assert steps[0][0]["loss_mask"].dtype == torch.float32


def test_the_number_of_workers_and_of_ranks_changes_no_sample(corpus):
    stream, start = stream_of(corpus, 40), DataPosition(2)
    alone = tokens_of(load(stream, start, 4))
    assert tokens_of(load(stream, start, 4, num_workers=2)) == alone
    ranks = [tokens_of(load(stream, start, 4, dp_rank=rank, dp_size=2)) for rank in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == sorted(alone)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_leaves_the_random_state_of_the_process_alone(corpus, num_workers):
    stream = stream_of(corpus, 40)
    before = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    list(load(stream, DataPosition(), 2, num_workers=num_workers))
    assert before == (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())


def test_a_stream_that_is_too_short_is_noticed_at_once(corpus):
    with pytest.raises(AssertionError, match="too short"):
        load(stream_of(corpus, 7), DataPosition(), 2)


def test_closing_the_iterator_ends_the_workers(corpus):
    steps = load(stream_of(corpus, 40), DataPosition(), 10, num_workers=2)
    earlier = set(children(os.getpid()))
    next(steps)
    workers = set(children(os.getpid())) - earlier
    assert len(workers) == 2
    steps.close()
    assert wait_until(lambda: not any(is_running(pid) for pid in workers), 10)


def test_workers_do_not_outlive_a_rank_that_is_killed(corpus):
    stream = stream_of(corpus, 40)
    rank = os.fork()
    if rank == 0:
        try:
            steps = load(stream, DataPosition(), 10, num_workers=2)
            next(steps)
            time.sleep(60)
        finally:
            os._exit(1)
    started = wait_until(lambda: len(children(rank)) == 2, 10)
    workers = children(rank)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert started
    assert wait_until(lambda: not any(is_running(pid) for pid in workers), 10)
