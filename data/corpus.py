"""Real text without a download: the sources of the Python that runs become a tokenised corpus.

`prepare` reads the `.py` files of the running interpreter's standard library, trains a tokenizer on them, and writes
`tokens.bin`, `tokens.idx`, `tokenizer.json` and `corpus.json` into `data.cache_dir/<digest>/`, once for all runs of the
same Python version and vocabulary size. The tests of the library, large tables and side programs are left out
(`LEFT_OUT`); some 8 MB in 400 documents stay, about ten seconds of work.

Documents stand in the order of the SHA-256 of their names. That is a shuffle which depends on nothing but the names:
the splits are contiguous ranges of documents, and in the alphabet's order the validation text would be the modules from
`x` to `z` alone. It does not depend on the run's seed either, so that runs with different seeds are judged by the same
text.
"""

import hashlib
import json
import platform
import sysconfig
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy

from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema import Data, DataSource
from shardwright.data.cache import build_once
from shardwright.data.indexed import open_indexed, write_indexed
from shardwright.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer

FORMAT_VERSION = 2
"""Part of the digest: a change to what is written, or how, gets another number and so another folder."""
LEFT_OUT = frozenset(
    ["test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "encodings", "turtledemo"]
)
"""Folders of the standard library that are no corpus: tests, what is installed, tables, side programs."""
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A tokenised corpus in the cache, and which of its documents belong to which split."""

    prefix: Path
    """Path of the `.bin` and `.idx`, without suffix."""
    tokenizer: Path
    """Path of the `tokenizer.json`."""
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
    """Documents [first, end) of each split."""
    split_tokens: Mapping[str, int]
    """Tokens of each split."""

    @property
    def digest(self) -> str:
        """Name of the corpus in the cache: source, Python version, vocabulary size, format."""
        return self.prefix.parent.name

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


def prepare(data: Data) -> Corpus:
    """Open the corpus of `data.source`, after building it where the cache has none.

    Every process may call this at any time; one builds under a lock, the others wait. torch-free.

    Raises:
        RefusedError: no sources, a vocabulary that is too small, a bad split, a damaged cache, no place to write.
    """
    assert data.source is DataSource.python_stdlib, f"{data.source} has no corpus"
    if data.vocab_size < SMALLEST_VOCABULARY:
        rule = f"a byte-level tokenizer has at least {SMALLEST_VOCABULARY} entries: 256 bytes and the end of document"
        small = Problem(key="data.vocab_size", value=data.vocab_size, rule=rule, remedy="2048 suits a tiny model")
        raise RefusedError([small])
    recipe = (data.source.value, platform.python_version(), data.vocab_size, FORMAT_VERSION)
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    folder = build_once(
        Path(data.cache_dir).absolute() / digest, lambda partial: _build(partial, stdlib_folder(), data.vocab_size)
    )

    facts = json.loads((folder / "corpus.json").read_text())
    lengths = open_indexed(folder / "tokens").lengths
    splits = split_documents(len(lengths), data.split)
    return Corpus(
        prefix=folder / "tokens",
        tokenizer=folder / "tokenizer.json",
        num_documents=len(lengths),
        num_tokens=facts["num_tokens"],
        eod_token=facts["eod_token"],
        vocab_size=facts["vocab_size"],
        tokens_sha256=facts["tokens_sha256"],
        skipped=facts["skipped"],
        splits=splits,
        split_tokens={name: int(lengths[first:end].sum(dtype=numpy.int64)) for name, (first, end) in splits.items()},
    )


def stdlib_folder() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _build(folder: Path, root: Path, vocab_size: int) -> None:
    """Read the sources below `root` and write the corpus into `folder`."""
    documents, num_undecodable = read_sources(root)
    if not any(text for _, text in documents):
        none = Problem(
            key="data.source",
            value="python_stdlib",
            rule=f"there are no sources of the standard library in {root}",
            remedy="use a Python that has them, or data=mock",
        )
        raise RefusedError([none])
    tokenizer = Tokenizer.train((text for _, text in documents), vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    written = write_indexed(
        folder / "tokens",
        ((name, tokenizer.encode(text)) for name, text in documents),
        vocab_size=tokenizer.vocab_size,
        eod_token=tokenizer.eod_token,
    )
    facts = {
        "python": platform.python_version(),
        "num_documents": written.num_documents,
        "num_tokens": written.num_tokens,
        "skipped": {"empty": written.num_empty, "undecodable": num_undecodable},
        "vocab_size": tokenizer.vocab_size,
        "eod_token": tokenizer.eod_token,
        "tokenizer_digest": tokenizer.digest,
        "tokens_sha256": hashlib.sha256((folder / "tokens.bin").read_bytes()).hexdigest(),
    }
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")


def read_sources(root: Path) -> tuple[list[tuple[str, str]], int]:
    """Name and text of every `.py` file below `root` outside of `LEFT_OUT`, in the order of the names' SHA-256.

    Returns:
        The documents, and how many files were passed over since their text does not decode or they cannot be read.
    """
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [name.as_posix() for name in names if LEFT_OUT.isdisjoint(name.parts)]
    documents, num_undecodable = [], 0
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            with tokenize.open(root / name) as source:  # honours the file's own coding line
                documents.append((name, source.read()))
        except (SyntaxError, UnicodeDecodeError, OSError):
            num_undecodable += 1
    return documents, num_undecodable


def split_documents(num_documents: int, shares: Sequence[float]) -> dict[str, tuple[int, int]]:
    """Contiguous documents [first, end) of every split: whole documents, rounded by largest remainders.

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
