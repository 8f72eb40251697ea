"""Where `run` opens its data: one object that gives the sample stream of every split, whatever the source.

`data` knows no megatron-core. Its dataset of one epoch comes in as a function, `parallel.mcore.datasets.gpt_epoch`.
"""

from pathlib import Path
from typing import Protocol

from shardwright.conf.choices import DataSource
from shardwright.conf.schema import Data
from shardwright.data.corpus import SPLITS, Corpus, prepare
from shardwright.data.mock import MockTokens
from shardwright.data.stream import Stream, TokenDataset


class BuildEpoch(Protocol):
    """Builds the samples of one epoch of a split of a corpus."""

    def __call__(
        self, corpus: Corpus, split: str, *, seq_length: int, seed: int, epoch: int, cache_dir: Path
    ) -> TokenDataset: ...


class Source:
    """The data of a run.

    Construction builds the corpus where the cache has none; every rank calls it, before a process group exists.

    Args:
        data: the configuration's section.
        seed: seed of the order of samples, `run.seed`.
        build_epoch: see `BuildEpoch`; not called for mock data.

    Raises:
        RefusedError: see `corpus.prepare`.
    """

    def __init__(self, data: Data, *, seed: int, build_epoch: BuildEpoch) -> None:
        self.corpus = None if data.source is DataSource.mock else prepare(data)
        self._data = data
        self._seed = seed
        self._build_epoch = build_epoch

    def stream(self, split: str, num_samples: int) -> Stream:
        """The first `num_samples` samples of the endless stream of a split (train, validation or test).

        Every rank calls it, before a process group exists.

        Raises:
            RefusedError: the split has not enough text for one sample.
        """

        def build_epoch(epoch: int) -> TokenDataset:
            data = self._data
            if self.corpus is None:
                seed = (self._seed, SPLITS.index(split), epoch)
                return MockTokens(seed, vocab_size=data.vocab_size, seq_length=data.seq_length)
            return self._build_epoch(
                self.corpus,
                split,
                seq_length=data.seq_length,
                seed=self._seed,
                epoch=epoch,
                cache_dir=Path(data.cache_dir).absolute(),
            )

        return Stream(build_epoch, num_samples)

    @property
    def identity(self) -> str:
        """The same for two runs exactly if their streams of equal seeds hold the same samples."""
        return "mock" if self.corpus is None else f"tokens {self.corpus.tokens_sha256[:16]}"

    def description(self) -> dict[str, str | int]:
        """Rows for the table at a run's start."""
        rows: dict[str, str | int] = {"source": self._data.source.value, "seq_length": self._data.seq_length}
        if self.corpus is not None:
            rows |= {"documents": self.corpus.num_documents, "tokens": self.corpus.num_tokens}
            rows |= {f"{name}_tokens": count for name, count in self.corpus.split_tokens.items()}
            rows |= {f"skipped_{reason}": count for reason, count in self.corpus.skipped.items()}
            rows |= {"vocab_size": self.corpus.vocab_size, "folder": str(self.corpus.prefix.parent)}
        return rows
