"""Tokens on disk in Megatron's indexed format, written and checked without torch.

`PREFIX.bin` holds the tokens of all documents one after another. `PREFIX.idx` says where each one lies:

    9 bytes  magic "MMIDIDX\\0\\0"   |  int32[N]      tokens of each sequence
    uint64   version, 1             |  int64[N]      byte offset of each sequence in the .bin
    uint8    token dtype            |  int64[D]      0, then the sequence that ends each document: N+1 entries here,
    uint64   N, sequences           |                since every document is one sequence
    uint64   D, documents + 1       |  (all little-endian)

megatron-core maps a `.bin` that is too short without a word, and fails, days later, at the first document that is gone;
without mmap it even returns whatever was in memory. So both sizes are checked here, before megatron-core opens a pair.

Source: megatron-core 0.19.2, megatron/core/datasets/indexed_dataset.py.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from shardwright.conf.problems import Problem, RefusedError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, "numpy.dtype[Any]"] = {
    1: numpy.dtype("u1"),
    2: numpy.dtype("i1"),
    3: numpy.dtype("<i2"),
    4: numpy.dtype("<i4"),
    5: numpy.dtype("<i8"),
    8: numpy.dtype("<u2"),
}
"""Megatron's codes of the integer types."""


def bin_path(prefix: Path) -> Path:
    """The file of the tokens."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """The file of lengths and offsets."""
    return prefix.with_name(f"{prefix.name}.idx")


def token_dtype(vocab_size: int) -> "numpy.dtype[Any]":
    """Smallest type that megatron-core itself would choose: uint16 below 65500 entries, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


type Ids = Sequence[int] | NDArray[Any]
"""Token ids of one document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What `write_indexed` put on disk."""

    num_documents: int
    num_tokens: int
    num_empty: int
    """Documents without a token, which were left out."""


def write_indexed(prefix: Path, documents: Iterable[tuple[str, Ids]], *, vocab_size: int, eod_token: int) -> Written:
    """Write documents as `PREFIX.bin` and `PREFIX.idx`, each one ended by `eod_token`.

    One document at a time is in memory, and the lengths of all.

    Args:
        prefix: path without suffix; its folder exists.
        documents: name and token ids of each; a document without tokens is left out.
        vocab_size: ids lie in [0, vocab_size); decides the type on disk.
        eod_token: end-of-document id.

    Raises:
        RefusedError: an id that does not fit, or no document with a token. Neither file is left then.
    """
    dtype = token_dtype(vocab_size)
    lengths = array("i")
    num_empty = 0
    try:
        with bin_path(prefix).open("wb") as tokens_file:
            for name, ids in documents:
                if not len(ids):
                    num_empty += 1
                    continue
                tokens = numpy.empty(len(ids) + 1, dtype=numpy.int64)
                tokens[:-1], tokens[-1] = ids, eod_token
                _refuse_misfits(name, tokens, vocab_size)
                tokens_file.write(tokens.astype(dtype).tobytes())
                lengths.append(len(tokens))
        if not lengths:
            rule = f"none of its {num_empty} documents has a token"
            raise RefusedError([Problem(key=str(prefix), value=f"{num_empty} documents", rule=rule)])
        write_index(prefix, lengths, dtype)
    except BaseException:
        bin_path(prefix).unlink(missing_ok=True)
        idx_path(prefix).unlink(missing_ok=True)
        raise
    return Written(num_documents=len(lengths), num_tokens=sum(lengths), num_empty=num_empty)


def _refuse_misfits(name: str, tokens: NDArray[numpy.int64], vocab_size: int) -> None:
    misfits = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(misfits):
        rule = f"token id {misfits[0]} does not fit a vocabulary of {vocab_size} entries"
        raise RefusedError([Problem(key=name, value=misfits[0], rule=rule, remedy="use the tokenizer's own size")])


def write_index(prefix: Path, lengths: Sequence[int], dtype: "numpy.dtype[Any]") -> None:
    """Write `PREFIX.idx` for sequences of these lengths (tokens), one per document, back to back in the `.bin`."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    sizes = numpy.asarray(lengths, dtype="<i4")
    with idx_path(prefix).open("wb") as index_file:
        index_file.write(HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1))
        index_file.write(sizes.tobytes())
        index_file.write(_offsets(sizes, dtype).tobytes())
        index_file.write(numpy.arange(len(sizes) + 1, dtype="<i8").tobytes())


def _offsets(lengths: NDArray[numpy.int32], dtype: "numpy.dtype[Any]") -> NDArray[numpy.int64]:
    """Byte offset of each sequence; 64-bit throughout, since 2**31 bytes are soon passed."""
    offsets = numpy.zeros(len(lengths), dtype="<i8")
    numpy.cumsum(lengths[:-1], dtype=numpy.int64, out=offsets[1:])
    return offsets * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedTokens:
    """A checked pair of `.bin` and `.idx`."""

    prefix: Path
    dtype: "numpy.dtype[Any]"
    lengths: NDArray[numpy.int32]
    """Tokens of each sequence."""
    offsets: NDArray[numpy.int64]
    """Byte offset of each sequence in the `.bin`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum(dtype=numpy.int64))

    def tokens(self, sequence: int, start: int = 0, count: int | None = None) -> NDArray[Any]:
        """Tokens [start, start + count) of one sequence; to its end without `count`."""
        rest = int(self.lengths[sequence]) - start
        count = rest if count is None else count
        if not 0 <= start <= start + count <= start + rest:
            raise IndexError(f"tokens {start}:{start + count} of sequence {sequence}, which has {start + rest}")
        offset = int(self.offsets[sequence]) + start * self.dtype.itemsize
        return numpy.fromfile(bin_path(self.prefix), dtype=self.dtype, count=count, offset=offset)


def open_indexed(prefix: Path) -> IndexedTokens:
    """Open a pair, after a check that both files are there, of this format, and exactly as long as they must be.

    Raises:
        RefusedError: with the path, the bytes expected and the bytes found.
    """
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise _damaged(path, "missing", "there is no such file")
    path = idx_path(prefix)
    found = path.stat().st_size
    if found < HEADER.size:
        raise _damaged(path, f"{found} bytes", f"expected at least {HEADER.size} bytes, found {found}")
    with path.open("rb") as index_file:
        magic, version, code, num_sequences, num_bounds = HEADER.unpack(index_file.read(HEADER.size))
    if magic != MAGIC or version != VERSION or code not in DTYPES:
        raise _damaged(path, "another format", f"its header is not that of indexed tokens, version {VERSION}")
    _refuse_size(path, HEADER.size + 12 * num_sequences + 8 * num_bounds)

    content = numpy.memmap(path, mode="r")
    lengths, offsets, bounds = (
        numpy.frombuffer(content, dtype=kind, count=count, offset=start)
        for kind, count, start in (
            ("<i4", num_sequences, HEADER.size),
            ("<i8", num_sequences, HEADER.size + 4 * num_sequences),
            ("<i8", num_bounds, HEADER.size + 12 * num_sequences),
        )
    )
    dtype = DTYPES[code]
    whole = (
        num_bounds
        and bounds[-1] == num_sequences
        and not (lengths < 0).any()
        and numpy.array_equal(offsets, _offsets(lengths, dtype))
    )
    if not whole:
        raise _damaged(path, f"{num_sequences} sequences", "its lengths, offsets and documents contradict each other")
    opened = IndexedTokens(prefix=prefix, dtype=dtype, lengths=lengths, offsets=offsets)
    _refuse_size(bin_path(prefix), opened.num_tokens * dtype.itemsize)
    return opened


def _refuse_size(path: Path, expected: int) -> None:
    found = path.stat().st_size
    if found != expected:
        raise _damaged(path, f"{found} bytes", f"expected {expected} bytes, found {found}")


def _damaged(path: Path, value: str, rule: str) -> RefusedError:
    remedy = f"copy or build .bin and .idx again; where {path.parent} is a cache, remove it and the next run builds it"
    return RefusedError([Problem(key=str(path), value=value, rule=rule, remedy=remedy)])
