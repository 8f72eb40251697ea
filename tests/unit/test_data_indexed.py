"""Indexed tokens on disk: what is written can be read, and what is damaged is refused at open."""

import re
from pathlib import Path

import numpy
import pytest

from shardwright.conf.problems import RefusedError
from shardwright.data.indexed import bin_path, idx_path, open_indexed, token_dtype, write_index, write_indexed

DOCUMENTS = [("first", [1, 2]), ("second", [4])]
"""With end-of-document token 0 they take 5 tokens, 10 bytes in uint16."""


def write(prefix: Path, documents=DOCUMENTS, vocab_size=512):
    return write_indexed(prefix, documents, vocab_size=vocab_size, eod_token=0)


def test_documents_come_back_with_the_end_of_document_token(tmp_path):
    written = write(tmp_path / "tokens")
    opened = open_indexed(tmp_path / "tokens")
    assert (written.num_documents, written.num_tokens, written.num_empty) == (2, 5, 0)
    assert [opened.tokens(i).tolist() for i in range(len(opened))] == [[1, 2, 0], [4, 0]]
    assert opened.tokens(0, start=1, count=1).tolist() == [2]
    with pytest.raises(IndexError):
        opened.tokens(0, start=2, count=2)


def test_empty_documents_are_left_out_and_counted(tmp_path):
    written = write(tmp_path / "tokens", [("a", []), ("b", [7, 8]), ("c", [])])
    assert (written.num_documents, written.num_empty) == (1, 2)
    assert open_indexed(tmp_path / "tokens").lengths.tolist() == [3]


def test_nothing_but_empty_documents_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(RefusedError, match="none of its 2 documents has a token"):
        write(tmp_path / "tokens", [("a", []), ("b", [])])
    assert list(tmp_path.iterdir()) == []


def test_the_type_on_disk_holds_every_id_of_the_vocabulary(tmp_path):
    assert token_dtype(2048) == numpy.uint16
    assert token_dtype(65537).itemsize == 4
    write(tmp_path / "tokens", [("large", [65535])], vocab_size=65536)
    assert open_indexed(tmp_path / "tokens").tokens(0).tolist() == [65535, 0]


@pytest.mark.parametrize("misfit", [512, 70000, -1])
def test_an_id_outside_of_the_vocabulary_is_refused_by_name_and_leaves_no_file(tmp_path, misfit):
    with pytest.raises(RefusedError, match=rf"module\.py.*token id {misfit} does not fit a vocabulary of 512"):
        write(tmp_path / "tokens", [*DOCUMENTS, ("module.py", [3, misfit])])
    assert list(tmp_path.iterdir()) == []


def test_a_bin_of_another_size_is_refused_with_both_sizes_and_its_path(tmp_path):
    write(tmp_path / "tokens")
    path = bin_path(tmp_path / "tokens")
    whole = path.read_bytes()
    for damaged in (whole[:6], whole + whole):
        path.write_bytes(damaged)
        expected = rf"{re.escape(str(path))}.*expected 10 bytes, found {len(damaged)}"
        with pytest.raises(RefusedError, match=expected):
            open_indexed(tmp_path / "tokens")


@pytest.mark.parametrize("size", [40, 20, 0])
def test_an_idx_that_is_cut_short_is_refused(tmp_path, size):
    write(tmp_path / "tokens")
    path = idx_path(tmp_path / "tokens")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RefusedError, match=rf"{re.escape(str(path))}.*bytes, found {size}"):
        open_indexed(tmp_path / "tokens")


def test_an_idx_that_is_missing_or_of_another_kind_is_refused(tmp_path):
    write(tmp_path / "tokens")
    path = idx_path(tmp_path / "tokens")
    whole = path.read_bytes()
    path.write_bytes(b"\x80PICKLE" + whole[8:])
    with pytest.raises(RefusedError, match="its header is not that of indexed tokens"):
        open_indexed(tmp_path / "tokens")
    path.write_bytes(whole[:34] + b"\xff" * 4 + whole[38:])  # the length of the first document becomes -1
    with pytest.raises(RefusedError, match="contradict each other"):
        open_indexed(tmp_path / "tokens")
    path.unlink()
    with pytest.raises(RefusedError, match="there is no such file"):
        open_indexed(tmp_path / "tokens")


def test_offsets_pass_two_gigabytes(tmp_path):
    prefix, marker = tmp_path / "tokens", numpy.array([11, 22, 33, 44], dtype=numpy.int32)
    write_index(prefix, [600_000_000] * 4, numpy.dtype(numpy.int32))
    with bin_path(prefix).open("wb") as sparse:
        sparse.seek(9_600_000_000 - marker.nbytes)
        sparse.write(marker.tobytes())
    opened = open_indexed(prefix)
    assert opened.offsets.tolist() == [0, 2_400_000_000, 4_800_000_000, 7_200_000_000]
    assert opened.tokens(3, start=600_000_000 - 4).tolist() == marker.tolist()
