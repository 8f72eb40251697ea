"""Three kinds of tokenizers behind one protocol: a `tokenizer.json`, a SentencePiece model, and the bytes themselves.

* `JsonTokenizer` is one of the `tokenizers` package: your own file, or a byte-level BPE that is trained on the corpus
  itself, so that nothing has to be downloaded. Byte-level means that the alphabet is the 256 bytes: every text can be
  written, no token is "unknown", and `decode(encode(text)) == text`. Training is deterministic, also over several
  threads: ties between equally frequent pairs are broken by their ids.
* `SentencePieceTokenizer` reads a `.model`; its package is an extra and is imported when such a file is opened.
* `ByteTokenizer` has nothing to learn and nothing to read: 256 bytes and the end of a document.

Only a special token can end documents. What a tokenizer's author declared special is never found in a text, so that a
document which contains its name does not end there.

The `tokenizers` package keeps its threads after encoding; a process forked later does not use them (loader workers
never tokenise), so `TOKENIZERS_PARALLELISM` need not be set.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from shardwright.conf.compose import override
from shardwright.conf.problems import Problem, RefusedError
from shardwright.conf.schema import BYTES
from shardwright.data.indexed import Ids

EOD = "<|endoftext|>"
"""The special token that ends every document of a trained or a byte tokenizer."""
USUAL_EODS = (EOD, "</s>", "<|end_of_text|>")
"""What ends a document where the configuration names nothing; the first that a tokenizer has."""
SENTENCEPIECE_SUFFIX = ".model"
SMALLEST_VOCABULARY = 257
"""The 256 bytes and `EOD`."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    eod_token: int
    """Id of the end-of-document token; no text has it."""
    vocab_size: int
    """Every id is smaller."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Token ids of each text, without `eod_token`; computed on all cores."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids."""
        ...

    def save(self, folder: Path) -> None:
        """Write the one file `tokenizer.json` or `tokenizer.model`."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of all entries and rules: equal digests, equal ids."""
        ...


def open_tokenizer(name: str, eod_token: str | None) -> Tokenizer:
    """Open what `data.tokenizer` names.

    Args:
        name: `bytes`, or a path that ends in `.json` or `.model`.
        eod_token: text of the end-of-document token; None for the usual one.

    Raises:
        RefusedError: it cannot be read, or has no such token.
    """
    if name == BYTES:
        return ByteTokenizer(eod_token)
    opened = SentencePieceTokenizer if name.endswith(SENTENCEPIECE_SUFFIX) else JsonTokenizer.load
    try:
        return opened(Path(name), eod_token)
    except RefusedError:
        raise
    except Exception as error:  # both packages raise plain Exceptions and RuntimeErrors
        first_line = str(error).strip().partition("\n")[0]
        raise _unreadable(name, first_line or type(error).__name__) from error


def fingerprint(name: str) -> str:
    """Which tokenizer `data.tokenizer` names, by its content, without opening it.

    Raises:
        RefusedError: there is no such file.
    """
    try:
        return BYTES if name == BYTES else hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError as error:
        raise _unreadable(name, error.strerror or "") from error


def _unreadable(name: str, why: str) -> RefusedError:
    remedy = f"give a tokenizer.json, a SentencePiece {SENTENCEPIECE_SUFFIX}, or data.tokenizer={BYTES}"
    return RefusedError([Problem(key="data.tokenizer", value=name, rule=f"cannot be read: {why}", remedy=remedy)])


def _find_eod(wanted: str | None, special: Mapping[str, int]) -> int:
    """Id of the token that ends a document, out of a tokenizer's special ones."""
    for name in USUAL_EODS if wanted is None else (wanted,):
        if name in special:
            return special[name]
    rule = "is no special token of the tokenizer"
    if wanted is None:
        rule = f"the tokenizer has none of the usual special tokens: {', '.join(USUAL_EODS)}"
    choices = " or ".join(override("data.eod_token", name) for name in list(special)[:8])
    remedy = f"{choices} works" if choices else "the tokenizer has no special token at all: add one to it"
    raise RefusedError([Problem(key="data.eod_token", value=wanted, rule=rule, remedy=remedy)])


class JsonTokenizer:
    """A tokenizer of the `tokenizers` package.

    Args:
        model: the tokenizer; what its file says of truncation and padding is switched off.
        eod_token: see `open_tokenizer`.
    """

    def __init__(self, model: tokenizers.Tokenizer, eod_token: str | None = None) -> None:
        added = model.get_added_tokens_decoder()
        self.eod_token: int = _find_eod(
            eod_token, {token.content: number for number, token in added.items() if token.special}
        )
        model.encode_special_tokens = True  # the text of a special token is ordinary characters
        model.no_truncation()
        model.no_padding()
        self._model = model
        self.vocab_size: int = max(model.get_vocab().values()) + 1  # ids may have gaps

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "JsonTokenizer":
        """Learn at most `vocab_size` entries, `EOD` and the 256 bytes included (fewer where the texts give no more)."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(f"a byte-level vocabulary has at least {SMALLEST_VOCABULARY} entries, not {vocab_size}")
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model)

    @classmethod
    def load(cls, path: Path, eod_token: str | None = None) -> "JsonTokenizer":
        """Read a `tokenizer.json`."""
        return cls(tokenizers.Tokenizer.from_file(str(path)), eod_token)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, readable by `tokenizers` and `transformers`."""
        self._model.save(str(folder / "tokenizer.json"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without `eod_token`."""
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; `eod_token` shows as its name."""
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def digest(self) -> str:
        """SHA-256 of all entries and rules: equal digests, equal ids."""
        return hashlib.sha256(self._model.to_str().encode()).hexdigest()


class SentencePieceTokenizer:
    """A SentencePiece model; its control pieces (`</s>` and the like) are its special tokens.

    Args:
        path: the `.model`.
        eod_token: see `open_tokenizer`.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        import sentencepiece

        self._proto = path.read_bytes()
        self._model = sentencepiece.SentencePieceProcessor(model_proto=self._proto)
        self.vocab_size: int = self._model.get_piece_size()
        control = (piece for piece in range(self.vocab_size) if self._model.is_control(piece))
        self.eod_token = _find_eod(eod_token, {self._model.id_to_piece(piece): piece for piece in control})

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model`."""
        (folder / "tokenizer.model").write_bytes(self._proto)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without `eod_token`."""
        ids: list[list[int]] = self._model.encode(list(texts), add_bos=False, add_eos=False, num_threads=-1)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; control pieces show as nothing."""
        text: str = self._model.decode([int(piece) for piece in ids])
        return text

    @property
    def digest(self) -> str:
        """SHA-256 of the model."""
        return hashlib.sha256(self._proto).hexdigest()


class ByteTokenizer:
    """The 256 bytes of UTF-8 and the end of a document, id 256."""

    vocab_size = SMALLEST_VOCABULARY

    def __init__(self, eod_token: str | None = None) -> None:
        self.eod_token = _find_eod(eod_token, {EOD: SMALLEST_VOCABULARY - 1})

    def save(self, folder: Path) -> None:
        """Write a `tokenizer.json` that gives the same ids."""
        _tokenizer_of_bytes().save(str(folder / "tokenizer.json"))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[numpy.uint8]]:
        """The bytes of each text."""
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; `eod_token` shows as its name."""
        return b"".join(EOD.encode() if token == self.eod_token else bytes([token]) for token in ids).decode()

    @property
    def digest(self) -> str:
        """SHA-256 of the `tokenizer.json`."""
        return hashlib.sha256(_tokenizer_of_bytes().to_str().encode()).hexdigest()


def _tokenizer_of_bytes() -> tokenizers.Tokenizer:
    """A BPE tokenizer without merges whose ids are the bytes.

    Source: openai/gpt-2, src/encoder.py, bytes_to_unicode: the byte-level alphabet writes printable bytes as themselves
    and the n-th of the others as character 256 + n.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([EOD])
    return model
