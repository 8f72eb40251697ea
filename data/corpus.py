"""Text becomes a tokenised corpus in the cache, once for all runs that ask for the same.

There is one way, whatever the source: a reader of documents (`data/documents.py`), a tokenizer (`data/tokenizer.py`),
and the writer of indexed tokens. `prepare` leaves `tokens.bin`, `tokens.idx`, the tokenizer's file and `corpus.json` in
`data.cache_dir/<digest>/`. `python_stdlib` needs no download: it trains a tokenizer on the sources of the running
Python, some 8 MB in 400 documents, about ten seconds of work. `text` reads your own files with your own tokenizer, and
may be larger than memory: documents are generators, encoded in bounded batches.

The splits are contiguous ranges of documents in an order of chance, or else the validation text would be the end of the
last file alone. Such an order must not need the texts in memory. Tokens are therefore written as they are read, and the
order is a permutation of the documents' numbers (`order_of_chance`), used where samples are made. It does not depend on
the run's seed, so that runs with different seeds are judged by the same text.
"""

import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from shardwright.conf.choices import DataSource
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema import Data
from shardwright.data.cache import build_once
from shardwright.data.documents import Documents, StandardLibrary, TextFiles
from shardwright.data.indexed import Ids, bin_path, open_indexed, write_indexed
from shardwright.data.tokenizer import SMALLEST_VOCABULARY, JsonTokenizer, Tokenizer, fingerprint, open_tokenizer

FORMAT_VERSION = 2
"""Part of the digest: a change to what is written, or how, gets another number and so another folder."""
BATCH_CHARACTERS = 2**22
"""About as much text is encoded at once: enough for all cores, little beside what a rank holds anyway."""
DOCUMENT_CHARACTERS = 64
"""What a document costs besides its text, counted as characters, so that a batch of tiny ones is bounded too."""
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A tokenised corpus in the cache, and which of its documents belong to which split."""

    prefix: Path
    """Path of the `.bin` and `.idx`, without suffix."""
    tokenizer: Path
    """Path of the `tokenizer.json` or `tokenizer.model`."""
    num_documents: int
    num_tokens: int
    """Tokens of all documents, end-of-document tokens included."""
    eod_token: int
    """Id of the end-of-document token."""
    vocab_size: int
    """Entries of the tokenizer: every token id is smaller."""
    tokens_sha256: str
    """Of the tokens themselves: two corpora with equal ones are the same text under the same tokenizer."""
    skipped: Mapping[str, int]
    """Documents left out, by reason: `empty`, `undecodable`."""
    splits: Mapping[str, tuple[int, int]]
    """Places [first, end) of each split in the order of documents."""
    split_tokens: Mapping[str, int]
    """Tokens of each split."""
    in_random_order: bool
    """Whether the order of documents is the one on disk, and not `order_of_chance`."""

    @property
    def digest(self) -> str:
        """Name of the corpus in the cache; stands for all that it is made of."""
        return self.prefix.parent.name

    def documents(self, split: str) -> NDArray[numpy.int64]:
        """Numbers of a split's documents on disk."""
        return _order(self.num_documents, self.in_random_order)[slice(*self.splits[split])]

    def samples_per_epoch(self, split: str, seq_length: int) -> int:
        """Samples that one pass over a split gives.

        A sample is `seq_length` tokens and the one that follows, which is the label of its last token. The samples of
        an epoch lie back to back in the shuffled documents; the tail that does not fill one, fewer than `seq_length`
        tokens, is left out, and another tail in each epoch.

        Raises:
            RefusedError: not even one.
        """
        num_samples = (self.split_tokens[split] - 1) // seq_length
        if num_samples > 0:
            return num_samples
        first, end = self.splits[split]
        never = "" if split == "train" else ", or schedule.eval_iters=0 to never evaluate"
        too_small = Problem(
            key="data.split",
            value=", ".join(f"{end - first} {name}" for name, (first, end) in self.splits.items()),
            rule=f"{split}: {end - first} documents of {self.num_documents}; need {seq_length + 1} tokens for one "
            f"sample of data.seq_length={seq_length}, found {self.split_tokens[split]}",
            remedy=f"a larger share of data.split or a shorter data.seq_length works{never}",
        )
        raise RefusedError([too_small])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    """What a corpus is made of."""

    documents: Documents
    open_tokenizer: Callable[[], Tokenizer]
    ingredients: Sequence[Any]
    """JSON of all that decides on the result; found without reading the documents."""


def prepare(data: Data) -> Corpus:
    """Open the corpus of `data.source`, after building it where the cache has none.

    Every process may call this at any time; one builds under a lock, the others wait. torch-free.

    Raises:
        RefusedError: no text, a bad line, a vocabulary that does not fit, a bad split, a damaged cache, no place to
            write.
    """
    recipe = _recipe(data)
    digest = hashlib.sha256(json.dumps(recipe.ingredients).encode()).hexdigest()[:16]
    folder = build_once(Path(data.cache_dir).absolute() / digest, lambda partial: _build(partial, recipe, data))

    facts = json.loads((folder / "corpus.json").read_text())
    _refuse_large_vocabulary(data, facts["vocab_size"])
    lengths = open_indexed(folder / "tokens").lengths
    in_random_order = recipe.documents.in_random_order
    ordered = lengths[_order(len(lengths), in_random_order)]
    splits = split_documents(len(lengths), data.split)
    return Corpus(
        prefix=folder / "tokens",
        tokenizer=next(folder.glob("tokenizer.*")),
        num_documents=len(lengths),
        num_tokens=facts["num_tokens"],
        eod_token=facts["eod_token"],
        vocab_size=facts["vocab_size"],
        tokens_sha256=facts["tokens_sha256"],
        skipped=facts["skipped"],
        splits=splits,
        split_tokens={name: int(ordered[first:end].sum(dtype=numpy.int64)) for name, (first, end) in splits.items()},
        in_random_order=in_random_order,
    )


def stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _recipe(data: Data) -> _Recipe:
    """What the corpus of `data.source` is made of, at this moment."""
    documents: Documents
    if data.source is DataSource.python_stdlib:
        if data.vocab_size < SMALLEST_VOCABULARY:
            rule = f"a byte-level tokenizer has at least {SMALLEST_VOCABULARY} entries: 256 bytes, the end of document"
            small = Problem(key="data.vocab_size", value=data.vocab_size, rule=rule, remedy="2048 suits a tiny model")
            raise RefusedError([small])
        documents = StandardLibrary(stdlib_folder())
        return _Recipe(
            documents=documents,
            open_tokenizer=lambda: JsonTokenizer.train((text for _, text in documents), data.vocab_size),
            ingredients=[data.source.value, *documents.fingerprint(), data.vocab_size, FORMAT_VERSION],
        )
    assert data.source is DataSource.text, f"{data.source} has no corpus"
    assert data.files and data.tokenizer and data.text_key, "the rules of a run ask for them"
    name, eod_token = data.tokenizer, data.eod_token
    documents = TextFiles(data.files, data.text_key)
    made_of = [*documents.fingerprint(), fingerprint(name), eod_token]
    return _Recipe(
        documents=documents,
        open_tokenizer=lambda: open_tokenizer(name, eod_token),
        ingredients=[data.source.value, *made_of, FORMAT_VERSION],
    )


def _build(folder: Path, recipe: _Recipe, data: Data) -> None:
    """Make the corpus and write it into `folder`."""
    documents = recipe.documents
    if not any(text for _, text in documents):
        raise RefusedError([documents.nothing()])
    tokenizer = recipe.open_tokenizer()
    _refuse_large_vocabulary(data, tokenizer.vocab_size)
    tokenizer.save(folder)
    written = write_indexed(
        folder / "tokens",
        encoded(documents, tokenizer),
        vocab_size=tokenizer.vocab_size,
        eod_token=tokenizer.eod_token,
    )
    if _recipe(data).ingredients != recipe.ingredients:
        rule = "files changed while they were read"
        raise RefusedError([Problem(key="data.files", value=shown(data.files), rule=rule, remedy="start again")])
    with bin_path(folder / "tokens").open("rb") as tokens_file:
        tokens_sha256 = hashlib.file_digest(tokens_file, "sha256").hexdigest()
    facts = {
        "python": platform.python_version(),
        "ingredients": recipe.ingredients,
        "num_documents": written.num_documents,
        "num_tokens": written.num_tokens,
        "skipped": {"empty": written.num_empty, **documents.skipped},
        "vocab_size": tokenizer.vocab_size,
        "eod_token": tokenizer.eod_token,
        "tokenizer_digest": tokenizer.digest,
        "tokens_sha256": tokens_sha256,
    }
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")


def _refuse_large_vocabulary(data: Data, num_entries: int) -> None:
    """Before anything is encoded: every id must be one of the model's."""
    if num_entries > data.vocab_size:
        rule = f"the tokenizer has {num_entries} entries, more than the model's vocabulary"
        remedy = f"model.vocab_size={num_entries} works, which data.vocab_size follows"
        raise RefusedError([Problem(key="data.vocab_size", value=data.vocab_size, rule=rule, remedy=remedy)])


def encoded(documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[str, Ids]]:
    """Names and token ids of all documents, in their order.

    A batch at a time, on all cores: the texts and ids of one batch are in memory.
    """
    for batch in _batches(documents):
        ids = tokenizer.encode_batch([text for _, text in batch])
        yield from zip((name for name, _ in batch), ids, strict=True)


def _batches(documents: Documents) -> Iterator[list[tuple[str, str]]]:
    """Documents in groups of about `BATCH_CHARACTERS`; a longer document is a group of its own."""
    batch: list[tuple[str, str]] = []
    num_characters = 0
    for name, text in documents:
        batch.append((name, text))
        num_characters += DOCUMENT_CHARACTERS + len(text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


@cache
def _order(num_documents: int, in_random_order: bool) -> NDArray[numpy.int64]:
    """The order of documents that splits are ranges of."""
    return numpy.arange(num_documents) if in_random_order else order_of_chance(num_documents)


def order_of_chance(num_documents: int) -> NDArray[numpy.int64]:
    """The numbers 0 to `num_documents` - 1, sorted by a hash of each.

    A function of the numbers alone, on any machine and with any version of numpy; documents that are added at the end
    leave the order of the others as it is.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators";
    it maps no two numbers to the same.
    """
    hashed = numpy.arange(1, num_documents + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashed = (hashed ^ (hashed >> numpy.uint64(shift))) * numpy.uint64(factor)
    return numpy.argsort(hashed ^ (hashed >> numpy.uint64(31)))


def split_documents(num_documents: int, shares: Sequence[float]) -> dict[str, tuple[int, int]]:
    """Contiguous places [first, end) of every split: whole documents, rounded by largest remainders.

    Args:
        num_documents: documents to share out.
        shares: one share each for training, validation and test, on any scale.

    Raises:
        RefusedError: not three shares, a negative one, or none above zero.
    """
    if len(shares) != len(SPLITS) or not all(0 <= share < float("inf") for share in shares) or not sum(shares):
        rule = "wants three shares for training, validation and test, none negative, at least one above zero"
        raise RefusedError([Problem(key="data.split", value=shares, rule=rule, remedy="[98, 1, 1] works")])
    exact = [Fraction(share) for share in shares]
    quotas = [num_documents * share / sum(exact) for share in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(SPLITS)), key=lambda split: counts[split] - quotas[split])
    for split in by_remainder[: num_documents - sum(counts)]:
        counts[split] += 1
    bounds = [sum(counts[:number]) for number in range(len(SPLITS) + 1)]
    return {name: (bounds[number], bounds[number + 1]) for number, name in enumerate(SPLITS)}
