"""A byte-level BPE tokenizer: trained on the corpus itself, so that nothing has to be downloaded.

Byte-level means that the alphabet is the 256 bytes: every text can be written, no token is "unknown", and
`decode(encode(text)) == text`. Training is deterministic, also over several threads: ties between equally frequent
pairs are broken by their ids. The `tokenizers` package keeps its threads after training; a process forked later does
not use them (loader workers never tokenise), so `TOKENIZERS_PARALLELISM` need not be set.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

EOD = "<|endoftext|>"
"""The special token that ends every document; as plain text inside a document it is ordinary characters."""
SMALLEST_VOCABULARY = 257
"""The 256 bytes and `EOD`."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        model: a tokenizer of the `tokenizers` package that knows `EOD`.
    """

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        eod_token = model.token_to_id(EOD)
        if eod_token is None:
            raise ValueError(f"the tokenizer has no token {EOD}")
        model.encode_special_tokens = True  # a document that contains the text of EOD must not end there
        self._model = model
        self.eod_token: int = eod_token
        self.vocab_size: int = model.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
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
    def load(cls, path: Path) -> "Tokenizer":
        """Read a `tokenizer.json`."""
        return cls(tokenizers.Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`, readable by `tokenizers` and `transformers`."""
        self._model.save(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without `eod_token`."""
        ids: list[int] = self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; `eod_token` shows as its name."""
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text

    @property
    def digest(self) -> str:
        """SHA-256 of all entries and rules: equal digests, equal ids."""
        return hashlib.sha256(self._model.to_str().encode()).hexdigest()
