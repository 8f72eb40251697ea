"""The corpus of the standard library's sources: built once, whole or not at all, and split by documents."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.conf.choices import DataSource
from shardwright.conf.problems import RefusedError
from shardwright.conf.schema import Data
from shardwright.data import corpus
from shardwright.data.cache import build_once
from shardwright.data.documents import StandardLibrary
from shardwright.data.indexed import bin_path, open_indexed
from shardwright.data.tokenizer import EOD, JsonTokenizer

NUM_MODULES = 10


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The configuration of a corpus of ten small modules."""
    library = tmp_path / "library"
    for folder in ("", "package", "test", "site-packages"):
        (library / folder).mkdir()
    for number in range(NUM_MODULES):
        (library / f"module{number}.py").write_text(f"def f{number}(x):\n    return x + {number} * 'ä'\n")
    (library / "package" / "__init__.py").write_text("")
    (library / "latin.py").write_bytes(b"text = '\xe4'\n")
    (library / "test" / "test_it.py").write_text("never = 'read'\n")
    (library / "site-packages" / "foreign.py").write_text("never = 'read'\n")
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: library)
    return Data(
        source=DataSource.python_stdlib,
        files=None,
        text_key=None,
        tokenizer=None,
        eod_token=None,
        seq_length=8,
        micro_batch_size=1,
        global_batch_size=1,
        rampup_batch_size=None,
        cache_dir=str(tmp_path / "cache"),
        vocab_size=300,
        split=[60, 20, 20],
        num_workers=0,
    )


def test_a_corpus_holds_every_module_with_text_and_decodes_to_it(data):
    made = corpus.prepare(data)
    tokenizer, opened = JsonTokenizer.load(made.tokenizer), open_indexed(made.prefix)
    texts = [tokenizer.decode(opened.tokens(i)) for i in range(len(opened))]
    expected = {f"def f{n}(x):\n    return x + {n} * 'ä'\n{EOD}" for n in range(NUM_MODULES)}
    assert set(texts) == expected
    assert made.num_documents == NUM_MODULES
    assert made.num_tokens == opened.num_tokens == sum(made.split_tokens.values())
    assert made.skipped == {"empty": 1, "undecodable": 1}
    assert made.vocab_size <= 300
    assert made.splits == {"train": (0, 6), "validation": (6, 8), "test": (8, 10)}


def test_a_second_call_does_no_work(data, monkeypatch):
    first = corpus.prepare(data)
    before = {path: path.stat().st_mtime_ns for path in Path(data.cache_dir).rglob("*")}
    monkeypatch.setattr(StandardLibrary, "__iter__", None)
    assert corpus.prepare(data) == first
    assert {path: path.stat().st_mtime_ns for path in Path(data.cache_dir).rglob("*")} == before


def test_two_builds_are_equal_byte_for_byte(data, tmp_path):
    first = corpus.prepare(data).prefix.parent
    data.cache_dir = str(tmp_path / "another")
    second = corpus.prepare(data).prefix.parent
    assert first.name == second.name
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_another_vocabulary_is_another_corpus_and_another_split_is_not(data):
    first = corpus.prepare(data)
    data.split = [1, 1, 0]
    assert corpus.prepare(data).prefix == first.prefix
    assert corpus.prepare(data).splits["train"] == (0, 5)
    data.vocab_size = 280
    assert corpus.prepare(data).prefix != first.prefix


def test_documents_are_shuffled_by_their_names_alone(data):
    documents = StandardLibrary(corpus.stdlib_folder())
    names = [name for name, _ in documents if name.startswith("module")]
    assert names != sorted(names)
    (corpus.stdlib_folder() / "aaa.py").write_text("new = 1\n")
    assert [name for name, _ in documents if name.startswith("module")] == names


def test_a_damaged_cache_is_refused(data):
    path = bin_path(corpus.prepare(data).prefix)
    expected = path.stat().st_size
    os.truncate(path, 6)
    with pytest.raises(RefusedError, match=f"expected {expected} bytes, found 6"):
        corpus.prepare(data)


def test_a_python_without_sources_is_refused_and_leaves_no_corpus(data, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_folder", lambda: tmp_path / "nothing")
    with pytest.raises(RefusedError, match=r"no sources of the standard library.*data=mock"):
        corpus.prepare(data)
    assert [path for path in Path(data.cache_dir).iterdir() if path.is_dir()] == []


def test_a_vocabulary_without_room_for_the_bytes_is_refused(data):
    data.vocab_size = 256
    with pytest.raises(RefusedError, match=r"data\.vocab_size=256.*at least 257"):
        corpus.prepare(data)


def test_a_cache_folder_that_cannot_be_written_is_refused(data, tmp_path):
    (tmp_path / "file").write_text("")
    data.cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(RefusedError, match=r"data\.cache_dir="):
        corpus.prepare(data)


def test_a_split_that_is_empty_is_refused_where_it_is_needed(data):
    data.split = [969, 30, 1]
    made = corpus.prepare(data)
    assert made.splits == {"train": (0, 10), "validation": (10, 10), "test": (10, 10)}
    assert made.samples_per_epoch("train", 8) > 0
    with pytest.raises(RefusedError, match=r"validation: 0 documents of 10; need 9 tokens.*schedule\.eval_iters=0"):
        made.samples_per_epoch("validation", 8)
    with pytest.raises(RefusedError, match=r"train: 10 documents of 10; need 1000001 tokens"):
        made.samples_per_epoch("train", 1_000_000)


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6), min_size=3, max_size=3).filter(any))
def test_splits_are_contiguous_complete_and_within_one_document_of_their_share(num_documents, shares):
    splits = corpus.split_documents(num_documents, shares)
    bounds = [bound for split in splits.values() for bound in split]
    assert (bounds[0], bounds[-1]) == (0, num_documents)
    assert bounds[1] == bounds[2] and bounds[3] == bounds[4]
    for share, (first, end) in zip(shares, splits.values(), strict=True):
        assert abs(end - first - num_documents * share / sum(shares)) < 1 + 1e-6


@pytest.mark.parametrize("shares", [[1, 1], [1, -1, 1], [0, 0, 0], [1, float("nan"), 1], [float("inf"), 1, 1]])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(RefusedError, match=r"data\.split="):
        corpus.split_documents(10, shares)


def test_the_name_of_the_special_token_in_a_text_ends_no_document():
    tokenizer = JsonTokenizer.train([f"x = '{EOD}'"], 300)
    (ids,) = tokenizer.encode_batch([f"y = '{EOD}'"])
    assert tokenizer.eod_token not in ids
    assert tokenizer.decode([*ids, tokenizer.eod_token]) == f"y = '{EOD}'{EOD}"


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    folder = tmp_path / "built"
    with pytest.raises(KeyboardInterrupt):
        build_once(folder, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    build_once(folder, lambda partial: (partial / "whole").write_text("whole"))
    assert [path.name for path in folder.iterdir()] == ["whole"]


BUILDER = """
import pathlib, sys, time
from shardwright.data.cache import build_once

def build(folder):
    with pathlib.Path(sys.argv[2]).open("a") as log:
        log.write("built\\n")
    (folder / "half").write_text("half")
    time.sleep(float(sys.argv[3]))
    (folder / "half").rename(folder / "whole")

build_once(pathlib.Path(sys.argv[1]), build)
"""


def start_builder(folder: Path, log: Path, seconds: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", BUILDER, folder, log, str(seconds)])


def wait_for(path: Path) -> None:
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


def test_what_a_killed_builder_left_is_never_used(tmp_path):
    folder, log = tmp_path / "cache" / "built", tmp_path / "log"
    builder = start_builder(folder, log, 60)
    wait_for(folder.with_name(".built.partial") / "half")
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    assert not folder.exists()
    assert start_builder(folder, log, 0).wait() == 0
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not folder.with_name(".built.partial").exists()


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path):
    folder, log = tmp_path / "built", tmp_path / "log"
    builders = [start_builder(folder, log, 0.3) for _ in range(3)]
    assert [builder.wait() for builder in builders] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert [path.name for path in folder.iterdir()] == ["whole"]
