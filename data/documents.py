"""Where the text comes from: the sources of the Python that runs, or your own files, one document after another.

A reader is iterated, as often as one likes, and holds one document at a time, so that a corpus may be larger than
memory. Whatever is wrong with a file is one error that names the file and the line: a document that is left out in
silence would be missed by nobody.

Your own files are `.jsonl` (an object a line, its text under `data.text_key`) and `.txt` (one document a file), each
also with `.gz`. They are read as UTF-8, with or without a byte order mark. Blank lines of a `.jsonl` are no documents.
"""

import glob
import gzip
import hashlib
import json
import platform
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwright.conf.compose import override, shown
from shardwright.conf.problems import Problem, RefusedError

SUFFIXES = (".jsonl", ".jsonl.gz", ".txt", ".txt.gz")
LEFT_OUT = frozenset(
    ["test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "encodings", "turtledemo"]
)
"""Folders of the standard library that are no corpus: tests, what is installed, tables, side programs."""


class Documents(Protocol):
    """Names and texts of documents; empty texts are among them."""

    in_random_order: bool
    """Whether neighbours have nothing to do with each other, so that any part of them is like the whole."""

    def __iter__(self) -> Iterator[tuple[str, str]]: ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """Documents that the last complete pass left out, by reason."""
        ...

    def fingerprint(self) -> list[Any]:
        """JSON that changes when the texts do; found without reading them."""
        ...

    def nothing(self) -> Problem:
        """What to say where no document has text."""
        ...


class StandardLibrary:
    """The `.py` files below a folder, outside of `LEFT_OUT`, in the order of the SHA-256 of their names.

    That is a shuffle which depends on nothing but the names: in the alphabet's order the validation text would be the
    modules from `x` to `z` alone.

    Args:
        root: folder of a standard library.
    """

    in_random_order = True

    def __init__(self, root: Path) -> None:
        self._root = root
        self._num_undecodable = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Files whose text does not decode, or that cannot be read, are passed over and counted."""
        names = [path.relative_to(self._root) for path in self._root.rglob("*.py")]
        kept = [name.as_posix() for name in names if LEFT_OUT.isdisjoint(name.parts)]
        num_undecodable = 0
        for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()):
            try:
                with tokenize.open(self._root / name) as source:  # honours the file's own coding line
                    text = source.read()
            except (SyntaxError, UnicodeDecodeError, OSError):
                num_undecodable += 1
            else:
                yield name, text
        self._num_undecodable = num_undecodable

    @property
    def skipped(self) -> Mapping[str, int]:
        """Files that do not decode."""
        return {"undecodable": self._num_undecodable}

    def fingerprint(self) -> list[Any]:
        """The version of Python."""
        return [platform.python_version()]

    def nothing(self) -> Problem:
        """No sources are installed."""
        return Problem(
            key="data.source",
            value="python_stdlib",
            rule=f"there are no sources of the standard library in {self._root}",
            remedy="use a Python that has them, or data=mock",
        )


class TextFiles:
    """Your own files, in the order in which they are named; a pattern's own in the order of the alphabet.

    Args:
        patterns: paths or globs, `data.files`.
        text_key: where the text of a JSON object is.

    Raises:
        RefusedError: see `find_files`.
    """

    in_random_order = False
    skipped: Mapping[str, int] = {}

    def __init__(self, patterns: Sequence[str], text_key: str) -> None:
        self._patterns = patterns
        self._text_key = text_key
        self._files, problems = find_files(patterns)
        if problems:
            raise RefusedError(problems)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Text by text.

        Raises:
            RefusedError: a file that cannot be read, a line that is no document; with file and line.
        """
        for path in self._files:
            documents = self._lines if ".jsonl" in path.suffixes[-2:] else _whole
            try:
                with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                    yield from documents(path, file)
            except (OSError, EOFError, zlib.error) as error:
                raise RefusedError([Problem(key=str(path), rule=f"cannot be read to its end: {error}")]) from error

    def _lines(self, path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, str]]:
        """One document for every line that is not blank."""
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                name = f"{path}:{number}"
                yield name, _text_of(name, line.rstrip(b"\r\n"), self._text_key)

    def fingerprint(self) -> list[Any]:
        """Path, size and time of the last change of every file, and the key of the text.

        A digest of the content would be surer, but is known only after hours of reading, and the cache is looked up by
        every rank at every start. A file that was merely touched or moved is tokenised again; the tokens are then the
        same, and so is the run's data (`Source.identity`).
        """
        stats = [(path, path.stat()) for path in self._files]
        return [self._text_key, [[str(path.absolute()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]]

    def nothing(self) -> Problem:
        """Nothing but empty texts."""
        rule = f"none of the {len(self._files)} files has a document with text"
        return Problem(key="data.files", value=shown(self._patterns), rule=rule)


def find_files(patterns: Sequence[str]) -> tuple[list[Path], list[Problem]]:
    """The files that paths and globs (`**` too) name, each once, and what is wrong with some.

    A pattern names files; folders that it also matches do not count. A file of another kind is a problem, not passed
    over.
    """
    found: dict[Path, None] = {}
    problems = []
    for pattern in patterns:
        here = Path(pattern)
        matches = [here] if here.exists() else [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
        files = [path for path in matches if path.is_file()]
        foreign = [path for path in files if not path.name.endswith(SUFFIXES)]
        rule, remedy = "", ""
        if here.is_dir() and pattern:
            rule, remedy = "is a folder", f"name its files: data.files=[{here}/*.jsonl]"
        elif not files:
            rule, remedy = "there is no such file", "paths are relative to where the run is started"
        elif foreign:
            rule = f"{foreign[0]} is none of the kinds that can be read: {', '.join(SUFFIXES)}"
        if rule:
            problems.append(Problem(key="data.files", value=pattern, rule=rule, remedy=remedy))
        found.update(dict.fromkeys(files))
    return list(found), problems


def _whole(path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """A file that is one document."""
    yield str(path), _decode(str(path), b"".join(file))


def _text_of(name: str, line: bytes, text_key: str) -> str:
    """The text that a line of JSON holds under `text_key`."""
    content = _decode(name, line)
    try:
        entry = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise _no_document(name, f"is no JSON: {why}") from error
    if not isinstance(entry, dict):
        raise _no_document(name, f"is no JSON object with a text under {text_key!r}")
    if text_key not in entry:
        texts = [override("data.text_key", key) for key, value in entry.items() if isinstance(value, str)]
        raise _no_document(name, f"has no {text_key!r}", f"{' or '.join(texts[:8])} works" if texts else "")
    text = entry[text_key]
    if not isinstance(text, str):
        raise _no_document(name, f"holds no text under {text_key!r}, but {json.dumps(text)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _no_document(name, "holds half of a surrogate pair, which is no character") from error
    return text


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8: byte 0x{content[error.start]:02x} at {error.start}"
        raise _no_document(name, rule, "convert it, for example with iconv") from error


def _no_document(name: str, rule: str, remedy: str = "") -> RefusedError:
    return RefusedError([Problem(key=name, rule=rule, remedy=remedy)])
