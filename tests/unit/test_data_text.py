"""Your own text: which files are read and how, by which tokenizer, and what is said where that cannot be."""

import gzip
import io
import json
import os
from pathlib import Path

import numpy
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from shardwright.conf.compose import compose, quoted
from shardwright.conf.problems import RefusedError
from shardwright.conf.schema import Data
from shardwright.data import corpus
from shardwright.data.corpus import encoded, order_of_chance, prepare
from shardwright.data.documents import TextFiles, find_files
from shardwright.data.indexed import open_indexed
from shardwright.data.tokenizer import EOD, ByteTokenizer, JsonTokenizer, open_tokenizer

TEXTS = [f"The document of number {number} says ä, and ends.\n" for number in range(10)]
END = 256
"""Id of the byte tokenizer's end of a document."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the files of a test lie."""
    (tmp_path / "texts").mkdir()
    return tmp_path / "texts"


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts)))
    return path


def settings(
    folder: Path, *files: str | Path, tokenizer: str | Path = "bytes", overrides: tuple[str, ...] = ()
) -> Data:
    """The section `data` for these files; all of the folder's where none is named."""
    listed = ",".join(quoted(str(file)) for file in files or [folder / "*"])
    own = [f"data.files=[{listed}]", f"data.tokenizer={quoted(str(tokenizer))}", "data.split=[1,0,0]"]
    return compose(["data=text", *own, f"data.cache_dir={folder.parent / 'cache'}", *overrides]).data


def texts_of(data: Data) -> list[str]:
    """Documents of the byte corpus, as they lie on disk; none has the end inside."""
    opened = open_indexed(prepare(data).prefix)
    documents = [opened.tokens(number).tolist() for number in range(len(opened))]
    assert all(ids.index(END) == len(ids) - 1 for ids in documents)
    return [bytes(ids[:-1]).decode() for ids in documents]


def refusal(data: Data) -> str:
    """The message with which a corpus is refused; nothing of it is left in the cache."""
    with pytest.raises(RefusedError) as caught:
        prepare(data)
    cache = Path(data.cache_dir)
    assert not cache.exists() or [path for path in cache.iterdir() if path.is_dir()] == []
    return str(caught.value)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json` of 300 entries."""
    folder = tmp_path_factory.mktemp("tokenizer")
    JsonTokenizer.train(TEXTS, 300).save(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of about 60 pieces."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "small.model"
    path.write_bytes(written.getvalue())
    return path


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files_of_every_kind_are_read_in_the_order_in_which_they_are_named(folder):
    write_lines(folder / "b.jsonl", TEXTS[:2])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(write_lines(folder / "x", TEXTS[2:4]).read_bytes()))
    (folder / "c.txt").write_text("\ufeff" + TEXTS[4])
    (folder / "d.txt.gz").write_bytes(gzip.compress(TEXTS[5].encode()))
    data = settings(folder, folder / "b*", folder / "*.txt", folder / "a.jsonl.gz", folder / "d.txt.gz")
    assert texts_of(data) == [TEXTS[0], TEXTS[1], TEXTS[4], TEXTS[2], TEXTS[3], TEXTS[5]]


def test_a_file_that_two_patterns_name_is_read_once_and_folders_are_looked_into(folder):
    (folder / "deep.jsonl").mkdir()
    paths = [write_lines(folder / "a.jsonl", TEXTS[:1]), write_lines(folder / "deep.jsonl" / "b[1].jsonl", TEXTS[1:2])]
    assert find_files([f"{folder}/a.jsonl", f"{folder}/**/*.jsonl"]) == (paths, [])
    assert find_files([str(paths[1])]) == ([paths[1]], [])  # its name, though it looks like a pattern


def test_what_names_no_text_is_refused_and_all_of_it_is_told(folder):
    (folder / "table.csv").write_text("a,b\n")
    message = refusal(settings(folder, folder, folder / "none*.jsonl", folder / "*.csv"))
    assert "3 problems" in message
    assert f"data.files={folder}: is a folder; name its files: data.files=[{folder}/*.jsonl]" in message
    assert f"data.files={folder}/none*.jsonl: there is no such file" in message
    assert f"{folder}/table.csv is none of the kinds that can be read: .jsonl, " in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut', "is no JSON: Unterminated string starting at, column 10"),
        (b"[" * 100_000, "is no JSON: "),
        (b'{"text": "\xe4"}', "is not UTF-8: byte 0xe4 at 10"),
        (b'["text"]', "is no JSON object with a text under 'text'"),
        (b'{"id": 1, "content": "a", "body": "b"}', "has no 'text'; data.text_key=content or data.text_key=body works"),
        (b'{"id": 1}', "has no 'text'\n"),
        (b'{"text": null}', "holds no text under 'text', but null"),
        (b'{"text": "\\ud800"}', "holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(folder, line, words):
    path = write_lines(folder / "a.jsonl", TEXTS[:2])
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n" + path.read_bytes())
    assert f"{path}:4: {words}" in refusal(settings(folder)) + "\n"


def test_a_file_that_ends_too_early_is_refused_by_name(folder):
    whole = gzip.compress("".join(TEXTS).encode(), mtime=0)
    (folder / "cut.txt.gz").write_bytes(whole[:-20])
    assert f"{folder}/cut.txt.gz: cannot be read to its end: " in refusal(settings(folder))


def test_blank_lines_are_no_documents_and_empty_ones_are_left_out_and_counted(folder):
    path = write_lines(folder / "a.jsonl", ["", TEXTS[0], "", " "])
    path.write_text("\n" + path.read_text() + " \n\n")
    (folder / "b.txt").write_text("")
    data = settings(folder)
    assert texts_of(data) == [TEXTS[0], " "]
    assert prepare(data).skipped == {"empty": 3}


def test_nothing_but_empty_documents_is_refused(folder):
    write_lines(folder / "a.jsonl", ["", ""])
    assert "none of the 1 files has a document with text" in refusal(settings(folder))


def test_the_text_is_where_the_key_says(folder):
    write_lines(folder / "a.jsonl", TEXTS, key="content")
    assert texts_of(settings(folder, overrides=("data.text_key=content",))) == TEXTS


def test_documents_are_read_as_they_are_encoded_and_not_all_at_once(monkeypatch):
    read = []

    def documents():
        for text in TEXTS:
            read.append(text)
            yield text, text

    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 2 * (corpus.DOCUMENT_CHARACTERS + len(TEXTS[0])))
    ids = encoded(documents(), ByteTokenizer())
    assert bytes(next(ids)[1]).decode() == TEXTS[0]
    assert len(read) == 2
    assert [name for name, _ in ids] == TEXTS[1:]


# ---- the cache and the order of documents ----------------------------------------------------------------------------


def test_a_corpus_is_read_once_and_again_when_a_file_changed(folder, monkeypatch):
    path = write_lines(folder / "a.jsonl", TEXTS)
    first = prepare(settings(folder))
    with monkeypatch.context() as patch:
        patch.setattr(TextFiles, "__iter__", None)
        assert prepare(settings(folder)) == first
    os.utime(path, (1, 1))
    touched = prepare(settings(folder))
    assert touched.digest != first.digest and touched.tokens_sha256 == first.tokens_sha256
    path.write_text(path.read_text().replace("number 3", "number x"))
    os.utime(path, (2, 2))
    assert prepare(settings(folder)).tokens_sha256 != first.tokens_sha256


def test_another_key_tokenizer_or_file_is_another_corpus(folder, tokenizer_json):
    path = write_lines(folder / "a.jsonl", TEXTS)
    write_lines(folder / "b.jsonl", TEXTS, key="content")
    path.write_text(path.read_text().replace('"id"', '"content": "x", "id"'))
    variants = [
        settings(folder, path),
        settings(folder, path, tokenizer=tokenizer_json),
        settings(folder, path, overrides=("data.text_key=content",)),
        settings(folder, overrides=("data.text_key=content",)),
    ]
    assert len({prepare(data).digest for data in variants}) == len(variants)


def test_a_file_that_changes_while_it_is_read_gives_no_corpus(folder, monkeypatch):
    path = write_lines(folder / "a.jsonl", TEXTS)
    encode = ByteTokenizer.encode_batch

    def encode_while_somebody_writes(self, texts):
        path.write_text(path.read_text() + '{"text": "more"}\n')
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_while_somebody_writes)
    assert "changed while they were read" in refusal(settings(folder))


def test_every_split_takes_documents_from_all_over_the_files(folder):
    write_lines(folder / "a.jsonl", [str(number) for number in range(1000)])
    made = prepare(settings(folder, overrides=("data.split=[80,10,10]",)))
    parts = [made.documents(split) for split in ("train", "validation", "test")]
    assert sorted(numpy.concatenate(parts).tolist()) == list(range(1000))
    lengths = open_indexed(made.prefix).lengths
    for part, tokens in zip(parts, made.split_tokens.values(), strict=True):
        assert tokens == lengths[part].sum()
        assert numpy.histogram(part, bins=4, range=(0, 1000))[0].min() >= len(part) / 8


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_order_of_chance_is_complete_and_more_documents_leave_it_as_it_is(few, more):
    order = order_of_chance(few + more).tolist()
    assert sorted(order) == list(range(few + more))
    assert [number for number in order if number < few] == order_of_chance(few).tolist()


def test_the_order_of_chance_is_that_of_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert order_of_chance(5).tolist() == sorted(range(5), key=lambda number: published[number])


def test_a_split_without_documents_is_refused_before_anything_is_trained(folder):
    write_lines(folder / "a.jsonl", TEXTS)
    made = prepare(settings(folder, overrides=("data.split=[969,30,1]",)))
    assert made.samples_per_epoch("train", 16) > 0
    with pytest.raises(RefusedError, match=r"validation: 0 documents of 10; need 17 tokens.*schedule\.eval_iters=0"):
        made.samples_per_epoch("validation", 16)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokenizer_json", "sentencepiece_model", "bytes"])
def test_a_corpus_decodes_to_its_texts_with_the_tokenizer_that_lies_beside_it(folder, kind, request):
    name = kind if kind == "bytes" else str(request.getfixturevalue(kind))
    write_lines(folder / "a.jsonl", TEXTS)
    made = prepare(settings(folder, tokenizer=name))
    opened, saved = open_indexed(made.prefix), open_tokenizer(str(made.tokenizer), None)
    documents = [opened.tokens(number).tolist() for number in range(len(opened))]
    assert [ids.pop() for ids in documents] == [saved.eod_token] * 10
    assert not any(saved.eod_token in ids for ids in documents)
    assert [saved.decode(ids).strip() for ids in documents] == [text.strip() for text in TEXTS]
    assert (made.eod_token, made.vocab_size) == (saved.eod_token, saved.vocab_size)


@pytest.mark.parametrize("kind", ["tokenizer_json", "sentencepiece_model"])
def test_a_tokenizer_with_more_entries_than_the_model_is_refused_with_both_numbers(folder, kind, request):
    tokenizer = request.getfixturevalue(kind)
    entries = open_tokenizer(str(tokenizer), None).vocab_size
    write_lines(folder / "a.jsonl", TEXTS)
    data = settings(folder, tokenizer=tokenizer, overrides=("model.vocab_size=40",))
    assert f"data.vocab_size=40: the tokenizer has {entries} entries" in (message := refusal(data))
    assert f"model.vocab_size={entries} works" in message
    data.vocab_size = entries
    prepare(data)
    data.vocab_size -= 1  # the corpus is in the cache now
    with pytest.raises(RefusedError, match=f"the tokenizer has {entries} entries"):
        prepare(data)


def test_the_name_of_a_special_token_in_a_text_is_ordinary_text(folder, tokenizer_json, sentencepiece_model):
    for name, text in ((tokenizer_json, f"before{EOD}after"), (sentencepiece_model, "says</s>and")):
        tokenizer = open_tokenizer(str(name), None)
        assert tokenizer.eod_token not in tokenizer.encode_batch([text])[0]


def test_what_a_tokenizer_json_says_of_truncation_and_padding_has_no_effect(tmp_path, tokenizer_json):
    model = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    model.enable_truncation(max_length=4)
    model.enable_padding(length=50)
    model.save(str(tmp_path / "tokenizer.json"))
    opened, plain = (open_tokenizer(str(path), None) for path in (tmp_path / "tokenizer.json", tokenizer_json))
    assert opened.encode_batch(TEXTS) == plain.encode_batch(TEXTS)


def special(path: Path, *names: str) -> str:
    """A `tokenizer.json` with these special tokens, whose ids begin at 1000."""
    vocabulary = {"[UNK]": 0} | {name: 1000 + number for number, name in enumerate(names)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.add_special_tokens(list(names))
    model.add_tokens(["<plain>"])
    model.save(str(path))
    return str(path)


def test_the_usual_end_of_document_is_found_and_another_can_be_named(tmp_path):
    path = special(tmp_path / "tokenizer.json", "</s>", "<|end_of_text|>", "<eos>")
    assert open_tokenizer(path, None).eod_token == 1000
    assert open_tokenizer(path, "<eos>").eod_token == 1002
    assert open_tokenizer(path, None).vocab_size > 1002, "ids have gaps, and all of them must fit the model"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (None, "data.eod_token: the tokenizer has none of the usual special tokens: <|endoftext|>, </s>, "),
        ("<end>", "data.eod_token=<end>: is no special token"),
        ("<plain>", "data.eod_token=<plain>: is no special token"),  # texts may have it
    ],
)
def test_without_an_end_of_document_the_candidates_are_named(tmp_path, wanted, words):
    path = special(tmp_path / "tokenizer.json", "<eos>", "<pad>")
    with pytest.raises(RefusedError) as caught:
        open_tokenizer(path, wanted)
    assert words in str(caught.value)
    assert "data.eod_token='<eos>' or data.eod_token='<pad>' works" in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "small.model"])
def test_a_file_that_is_no_tokenizer_is_refused(folder, name):
    write_lines(folder / "a.jsonl", TEXTS)
    path = folder.parent / name
    assert f"data.tokenizer={path}: cannot be read: No such file" in refusal(settings(folder, tokenizer=path))
    path.write_text("{}")
    assert f"data.tokenizer={path}: cannot be read: " in refusal(settings(folder, tokenizer=path))


@pytest.fixture(scope="module")
def json_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    """The file that a byte tokenizer saves, read by the tokenizers package."""
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(folder)
    return JsonTokenizer.load(folder / "tokenizer.json")


@given(text=st.text())
def test_the_byte_tokenizer_saves_a_tokenizer_json_with_the_same_ids(json_of_bytes, text):
    (ids,) = ByteTokenizer().encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode([*ids, END]) == json_of_bytes.decode([*ids, END]) == text + EOD
    assert json_of_bytes.encode_batch([text]) == [ids.tolist()]
    assert (json_of_bytes.eod_token, json_of_bytes.vocab_size) == (END, 257)
