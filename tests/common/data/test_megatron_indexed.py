"""Megatron's indexed files, byte by byte, and what is wrong with them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from common.data.megatron import indexed
from common.data.megatron.indexed import bin_of, check_all, dtype_for, idx_of, indexed_writer, open_indexed, read_index
from common.errors import DataError

DOCUMENTS = [[5, 6, 258], [8], [9, 10]]


def write(prefix: Path, documents=DOCUMENTS, vocabulary: int = 300) -> Path:
    with indexed_writer(prefix, vocabulary) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def test_bytes_of_a_small_vocabulary(tmp_path):
    prefix = write(tmp_path / "half.en_6_text_document")

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "half.en_6_text_document.bin",
        "half.en_6_text_document.idx",
    ]
    assert bin_of(prefix).read_bytes().hex(" ", 2) == "0500 0600 0201 0800 0900 0a00"
    assert idx_of(prefix).read_bytes().hex() == (
        "4d4d49444944580000"  # magic
        "0100000000000000"  # version 1
        "08"  # uint16
        "0300000000000000"  # three sequences
        "0400000000000000"  # four entries of the document index
        "03000000"
        "01000000"
        "02000000"  # lengths
        "0000000000000000"
        "0600000000000000"
        "0800000000000000"  # bytes before each
        "0000000000000000"
        "0100000000000000"
        "0200000000000000"
        "0300000000000000"  # first sequences
    )


def test_bytes_of_a_large_vocabulary(tmp_path):
    prefix = write(tmp_path / "c4", [[65500, 1], [2]], 128256)

    assert bin_of(prefix).read_bytes().hex(" ", 4) == "dcff0000 01000000 02000000"
    written = idx_of(prefix).read_bytes()
    assert written[17] == 4
    assert struct.unpack_from("<2q", written, 34 + 4 * 2) == (0, 8)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(50257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_dtype_follows_from_the_vocabulary(vocabulary, dtype):
    assert dtype_for(vocabulary) == np.dtype(dtype)


def test_size_of_an_index_is_the_published_one(tmp_path):
    """91,205 documents of C4's validation set: 1,824,142 bytes."""
    path = tmp_path / "x.idx"
    indexed.write_index(path, dtype_for(50257), np.full(91_205, 3, np.int32))

    assert path.stat().st_size == 42 + 20 * 91_205 == 1_824_142
    found = read_index(path)
    assert found.pointers[-1] == 91_204 * 3 * 2
    assert found.documents[-1] == 91_205


def test_offsets_pass_four_gigabytes(tmp_path):
    path = tmp_path / "x.idx"
    indexed.write_index(path, dtype_for(128256), np.array([2**30, 2**30, 5], np.int32))

    assert read_index(path).pointers.tolist() == [0, 2**32, 2**33]


@pytest.mark.parametrize("vocabulary", [300, 128256])
def test_what_was_written_is_read(tmp_path, vocabulary):
    documents = [[1], list(range(40)), [299, 0]]
    opened = open_indexed(write(tmp_path / "x", documents, vocabulary))

    assert [opened.sequence(number).tolist() for number in range(len(opened))] == documents
    assert opened.sequence(1, 3, 6).tolist() == [3, 4, 5]
    check_all(opened, vocabulary)


def test_a_document_without_tokens_is_a_document_without_a_sequence(tmp_path):
    """As NeMo's preparation writes it."""
    opened = open_indexed(write(tmp_path / "x", [[1, 2], [], [3]]))

    assert opened.index.lengths.tolist() == [2, 1]
    assert opened.index.documents.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("token", [-1, 300, 2**40])
def test_a_token_beyond_the_vocabulary_is_not_written(tmp_path, token):
    with pytest.raises(DataError, match=rf"document 1 has token {token}, outside a vocabulary of 300"):
        write(tmp_path / "x", [[1, 2], [3, token]])
    assert not bin_of(tmp_path / "x").exists()
    assert not idx_of(tmp_path / "x").exists()


def damaged(prefix: Path, change) -> None:
    path = idx_of(prefix)
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content) or content)


def put(form: str, offset: int, value):
    def change(content: bytearray) -> None:
        struct.pack_into(form, content, offset, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("<8s", 0, b"TNTIDX\0\0"), "begins with .*TNTIDX.*it is no such file"),
        (put("<Q", 9, 2), "version 2; version 1 is known"),
        (put("<B", 17, 6), "dtype 6, which is none of tokens"),
        (put("<B", 17, 9), "dtype 9"),
        (put("<Q", 18, 4), "102 bytes where 4 sequences and 4 entries of documents take 114"),
        (put("<Q", 26, 5), "102 bytes where 3 sequences and 5 entries of documents take 110"),
        (lambda content: content[:-3], "has 99 bytes where 3 sequences"),
        (lambda content: content + b"\0", "has 103 bytes where 3 sequences"),
        (lambda content: content[:20], "20 bytes, too few for the header"),
        (put("<q", 34 + 12 * 3 + 8 * 3, 2), "document index does not run from 0 to 3 sequences"),
    ],
)
def test_an_index_that_is_no_such_file_or_of_other_lengths(tmp_path, change, message):
    prefix = write(tmp_path / "x")
    damaged(prefix, change)

    with pytest.raises(DataError, match=message) as raised:
        read_index(idx_of(prefix))
    assert str(idx_of(prefix)) in str(raised.value)


def test_tokens_that_are_cut_off(tmp_path):
    prefix = write(tmp_path / "x")
    bin_of(prefix).write_bytes(bin_of(prefix).read_bytes()[:-2])

    with pytest.raises(DataError, match=r"x\.bin has 10 bytes where x\.idx says 12: it is cut off"):
        open_indexed(prefix)


def test_tokens_of_another_index(tmp_path):
    prefix = write(tmp_path / "x")
    write(tmp_path / "y", [[1] * 9])
    bin_of(tmp_path / "y").replace(bin_of(prefix))

    with pytest.raises(DataError, match="says 12: it is of another index"):
        open_indexed(prefix)


@pytest.mark.parametrize("ends", [bin_of, idx_of])
def test_a_missing_file(tmp_path, ends):
    prefix = write(tmp_path / "x")
    ends(prefix).unlink()

    with pytest.raises(DataError, match=f"{ends(prefix).name} cannot be read"):
        open_indexed(prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("<i", 34 + 4, 0), "sequence 1 has 0 tokens"),
        (put("<i", 34, 4), "sequence 1 does not begin where the one before it ends"),
        (put("<q", 34 + 12 * 3 + 8, 3), "document index goes back"),
    ],
)
def test_sequences_that_do_not_follow_one_another(tmp_path, change, message):
    prefix = write(tmp_path / "x")
    damaged(prefix, change)

    with pytest.raises(DataError, match=message):
        check_all(open_indexed(prefix), 300)


@pytest.mark.parametrize(("vocabulary", "token"), [(300, 300), (128256, 299)])
def test_a_token_beyond_the_vocabulary_is_found(tmp_path, monkeypatch, vocabulary, token):
    monkeypatch.setattr(indexed, "_AT_ONCE", 2)
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, token], [5]], max(vocabulary, 301))

    with pytest.raises(DataError, match=rf"x\.bin: sequence 1 has token {token}, outside a vocabulary of {token}"):
        check_all(open_indexed(prefix), token)


def test_a_negative_token_is_found(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2], [3]], 128256)
    np.array([1, -2, 3], "<i4").tofile(bin_of(prefix))

    with pytest.raises(DataError, match="sequence 0 has token -2"):
        check_all(open_indexed(prefix), 128256)
