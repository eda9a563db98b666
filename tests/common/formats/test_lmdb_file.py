"""LMDB files of samples: what the library reads, and files that it must not read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from common.formats.lmdb_file import LmdbFile, write

VALUES = [bytes([number]) * (700 * number) for number in range(24)]


def written(path: Path, pairs: dict[bytes, bytes]) -> Path:
    """Write a file with the library alone."""
    with lmdb.open(str(path), map_size=2**30, subdir=False, lock=False) as file, file.begin(write=True) as transaction:
        for key, value in pairs.items():
            transaction.put(key, value)
    return path


def test_a_written_file_has_decimal_keys_and_a_pickled_length(tmp_path):
    assert write(tmp_path / "a.lmdb", VALUES) == 24
    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, readonly=True, lock=False) as file, file.begin() as found:
        pairs = dict(found.cursor())
    assert pairs == {str(number).encode(): value for number, value in enumerate(VALUES)} | {b"length": pickle.dumps(24)}


@pytest.mark.parametrize("protocol", range(6))
def test_lengths_of_every_protocol_are_read(protocol, tmp_path):
    path = written(tmp_path / "a.lmdb", {b"299": b"value", b"length": pickle.dumps(300, protocol)})
    file = LmdbFile(path)
    assert (file.length, file.read(299)) == (300, b"value")
    file.close()


def test_the_latest_transaction_decides_how_many_pages_there_are(tmp_path):
    """Each transaction writes the other of two pages with the state of the file."""
    path = written(tmp_path / "a.lmdb", {b"0": b"first", b"length": pickle.dumps(1)})
    for number in range(1, 4):
        written(path, {str(number).encode(): b"x" * 100_000, b"length": pickle.dumps(number + 1)})
        file = LmdbFile(path)
        assert (file.length, len(file.read(number))) == (number + 1, 100_000)
        file.close()
        size = path.stat().st_size
        (cut := tmp_path / f"cut{number}.lmdb").write_bytes(path.read_bytes()[: size - 4096])
        with pytest.raises(ValueError, match="it is truncated"):
            LmdbFile(cut)


def test_a_sample_that_is_missing_is_an_error(tmp_path):
    file = LmdbFile(written(tmp_path / "a.lmdb", {b"0": b"value", b"length": pickle.dumps(2)}))
    with pytest.raises(ValueError, match="it has no sample 1, though its length is 2"):
        file.read(1)
    file.close()


@pytest.mark.parametrize(
    ("length", "complaint"),
    [
        (None, "it has no length: the program that wrote it was interrupted"),
        (pickle.dumps("24"), "its length is no number"),
        (pickle.dumps(-1), "its length is no number"),
        (pickle.dumps(24)[:-1], "its length is no number: the pickle is cut off"),
        (pickle.dumps(print), "its length is no number: its pickle asks for builtins.print"),
    ],
    ids=["missing", "text", "negative", "cut off", "function"],
)
def test_a_file_without_a_length_is_refused_and_closed(length, complaint, tmp_path):
    path = written(tmp_path / "a.lmdb", {b"0": b"value"} | ({} if length is None else {b"length": length}))
    with pytest.raises(ValueError, match=complaint) as kept:  # with the object in its traceback
        LmdbFile(path)
    with pytest.raises(ValueError, match=complaint):  # the library refuses to open a file twice
        LmdbFile(path)
    assert kept.tb is not None


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data[: len(data) // 2], r"it is truncated: [\d,]+ bytes, and its \d+ pages have [\d,]+"),
        (lambda data: data[:-1], "it is truncated: "),
        (lambda data: data[:4200], "it is truncated"),
        (lambda data: data[:100], "it is no LMDB file, or truncated"),
        (lambda data: b"", "it is no LMDB file, or truncated"),
        (lambda data: bytes(len(data)), "it is no LMDB file"),
    ],
    ids=["half", "last byte", "second page", "first page", "empty", "zeros"],
)
def test_a_truncated_file_is_not_mapped(damage, complaint, tmp_path):
    """Reading it would end the process with a signal."""
    write(tmp_path / "a.lmdb", VALUES)
    (tmp_path / "b.lmdb").write_bytes(damage((tmp_path / "a.lmdb").read_bytes()))
    with pytest.raises(ValueError, match=rf"^{complaint}"):
        LmdbFile(tmp_path / "b.lmdb")


def test_an_interrupted_file_has_no_length_and_is_written_again(tmp_path):
    def failing() -> Iterator[bytes]:
        yield from VALUES
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write(tmp_path / "a.lmdb", failing())
    with pytest.raises(ValueError, match="it has no length"):
        LmdbFile(tmp_path / "a.lmdb")
    assert write(tmp_path / "a.lmdb", VALUES) == len(VALUES)


def test_nothing_of_an_existing_file_stays(tmp_path):
    write(tmp_path / "a.lmdb", VALUES)
    write(tmp_path / "a.lmdb", VALUES[:2])
    file = LmdbFile(tmp_path / "a.lmdb")
    assert (file.length, file.read(1)) == (2, VALUES[1])
    with pytest.raises(ValueError, match="it has no sample 2"):
        file.read(2)
    file.close()
