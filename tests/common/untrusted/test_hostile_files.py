"""Damaged, ambiguous or excessive archives, arrays and JSON end in one message."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from common.data.fetching import unpack
from common.errors import DataError
from common.formats import npy
from common.untrusted.archives import read_gzip
from common.untrusted.array_file import HEADER_BYTES, MAGIC, read_npz
from common.untrusted.regular_file import lines, read_bytes, read_text
from common.untrusted.strict_json import StrictJsonError, parse_object, read_json_object, read_large_json
from tests.common.untrusted.hostile import complaints

Member = tuple[str, bytes, bytes]  # name, type, content


def tar(path: Path, members: list[Member], compressed: bool = True) -> Path:
    """Write a ``.tar.gz`` of these members."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), kind, "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
    path.write_bytes(gzip.compress(content.getvalue(), mtime=0) if compressed else content.getvalue())
    return path


FILE = tarfile.REGTYPE
INSIDE = "LibriSpeech/dev-clean/"
FOLDERS = {INSIDE.rstrip("/"): "dev-clean"}
GOOD = [(f"{INSIDE}84/121123/84-121123.trans.txt", FILE, b"84-121123-0000 GO\n")]
TARS: dict[str, list[Member]] = {
    "a file below a file": [(f"{INSIDE}a", FILE, b"1"), (f"{INSIDE}a/b", FILE, b"2")],
    "a folder that is a file": [(f"{INSIDE}a/b", FILE, b"1"), (f"{INSIDE}a", FILE, b"2")],
    "twice": [(f"{INSIDE}a", FILE, b"1"), (f"{INSIDE}a", FILE, b"2")],
    "the folder itself": [(INSIDE.rstrip("/"), FILE, b"1")],
    "a long name": [(f"{INSIDE}{'x' * 300}", FILE, b"1")],
    "a long path": [(f"{INSIDE}{'x/' * 2000}y", FILE, b"1")],
    "outside": [(f"{INSIDE}../../../outside", FILE, b"1")],
    "a link": [(f"{INSIDE}a", tarfile.SYMTYPE, b"")],
    "a device": [(f"{INSIDE}a", tarfile.CHRTYPE, b"")],
    "a pipe": [(f"{INSIDE}a", tarfile.FIFOTYPE, b"")],
    "nothing of the subset": [("LibriSpeech/other/a", FILE, b"1")],
}


@pytest.mark.parametrize("name", sorted(TARS))
def test_a_hostile_member_is_one_error_and_nothing_is_unpacked(tmp_path, name):
    archive = tar(
        tmp_path / "dev-clean.tar.gz", [*GOOD, *TARS[name]] if name != "nothing of the subset" else TARS[name]
    )
    with pytest.raises(DataError, match=r"dev-clean\.tar\.gz"):
        unpack(archive, tmp_path, FOLDERS)
    assert not (tmp_path / "dev-clean").exists()
    assert not (tmp_path / "outside").exists()


def test_an_archive_is_unpacked(tmp_path):
    unpack(tar(tmp_path / "dev-clean.tar.gz", GOOD), tmp_path, FOLDERS)
    assert (tmp_path / "dev-clean/84/121123/84-121123.trans.txt").read_bytes() == GOOD[0][2]


@pytest.mark.parametrize("length", [0, 1, 10, 20, 60, 100])
def test_an_archive_that_is_cut_off_is_one_error(tmp_path, length):
    archive = tar(tmp_path / "dev-clean.tar.gz", GOOD)
    archive.write_bytes(archive.read_bytes()[:length])
    with pytest.raises(DataError, match=r"dev-clean\.tar\.gz"):
        unpack(archive, tmp_path, FOLDERS)


def unpack_beside(path: Path) -> None:
    """Unpack an archive into a folder next to it."""
    unpack(path, path.with_name(f"{path.name}.unpacked"), FOLDERS)


def read_header_of(path: Path) -> None:
    """Read a path as an array, and as an archive of arrays."""
    try:
        npy.load(path, np.dtype(np.float32), (3,))
        read_npz(path, ("a",), 2**20)
    except (OSError, ValueError) as error:
        if path.name != "valid.npy":
            raise DataError(f"{path}: {error}") from error


def bomb(head: bytes, size: int) -> bytes:
    """Return a gzip stream that inflates to ``head`` and ``size`` null bytes."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as file:
        file.write(head)
        for _ in range(size >> 20):
            file.write(bytes(2**20))
    return packed.getvalue()


def test_bombs_cost_little_and_end_in_a_message(tmp_path):
    def header(kind: bytes, size: int) -> bytes:
        info = tarfile.TarInfo(f"{INSIDE}a")
        info.type, info.size = kind, size
        return info.tobuf(tarfile.GNU_FORMAT)

    contents = {
        "a name of 500 MB": bomb(header(tarfile.GNUTYPE_LONGNAME, 500 << 20), 500 << 20),
        "attributes of 500 MB": bomb(header(tarfile.XHDTYPE, 500 << 20), 500 << 20),
        "a file of 500 MB": bomb(header(FILE, 500 << 20), 500 << 20),
        "300,000 empty files": gzip.compress(header(FILE, 0) * 300_000, 1, mtime=0),
    }
    valid = tar(tmp_path / "valid.tar.gz", GOOD)
    files = {name: tmp_path / f"bomb{number}.tar.gz" for number, name in enumerate(contents)}
    for name, path in files.items():
        path.write_bytes(contents[name])
    assert complaints("tests.common.untrusted.test_hostile_files:unpack_beside", valid, files) == []


def array_header(text: str, version: bytes = b"\1\0") -> bytes:
    """Return a header of a ``.npy`` file with this text."""
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(text))
    return MAGIC + version + length + text.encode("latin1")


PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }\n"
ARRAYS = {
    "huge shape": array_header(PLAIN % "1000000000000,"),
    "shapes that overflow": array_header(PLAIN % ("999999999999999999, " * 60)),
    "a shape of digits": array_header(PLAIN % ("9" * 5000)),
    "brackets": array_header("(" * 9000),
    "signs": array_header("{'shape': " + "-" * 9000 + "1}"),
    "a long header": array_header(" " * (HEADER_BYTES + 1)),
    "a header of 4 GB": MAGIC + b"\2\0\xff\xff\xff\xff",
    "objects": array_header("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }")
    + b"\x80\x02Nr\xff\xff\xff\x7f.",
    "fields": array_header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,), }"),
    "no such dtype": array_header("{'descr': '<f3', 'fortran_order': False, 'shape': (3,), }"),
    "a field twice": array_header("{'descr': '<f4', 'descr': '<f4', 'shape': (3,), }"),
    "a negative size": array_header(PLAIN % "-3,"),
    "negative format": MAGIC + b"\xff\xff",
}


def test_hostile_arrays_cost_little_and_end_in_a_message(tmp_path):
    np.save(tmp_path / "valid.npy", np.zeros(3, np.float32))
    files = {name: tmp_path / f"hostile{number}.npy" for number, name in enumerate(ARRAYS)}
    for name, path in files.items():
        path.write_bytes(ARRAYS[name])
    files["an archive"] = tmp_path / "archive.npy"
    with open(files["an archive"], "wb") as file:
        np.savez_compressed(file, a=np.zeros(100_000_000, np.float32))
    files["a pipe"] = tmp_path / "pipe.npy"
    os.mkfifo(files["a pipe"])
    reader = "tests.common.untrusted.test_hostile_files:read_header_of"
    assert complaints(reader, tmp_path / "valid.npy", files) == []


def test_arrays_of_an_archive_are_read(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", mu=np.arange(3.0), sigma=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    mean, covariance = read_npz(tmp_path / "a.npz", ("mu", "sigma"), 2**20)
    np.testing.assert_array_equal(mean, [0, 1, 2])
    np.testing.assert_array_equal(covariance, [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(ValueError, match="lacks"):
        read_npz(tmp_path / "a.npz", ("other",), 2**20)


JSON = {
    "nested lists": "[" * 200_000 + "]" * 200_000,
    "nested objects": '{"a":' * 200_000 + "1" + "}" * 200_000,
    "a million lists": "[" + "[]," * 5_000_000 + "[]]",
    "a number of 400 digits": '{"a": 1%s}' % ("0" * 400),
    "a number of a million digits": '{"a": %s}' % ("7" * 1_000_000),
    "a key twice": '{"a": 1, "a": 2}',
    "empty": "",
    "half a character": '{"a": "\udc80"}',
}


def test_hostile_json_costs_little_and_ends_in_a_message(tmp_path):
    (tmp_path / "valid.json").write_text("{}")
    files = {name: tmp_path / f"hostile{number}.json" for number, name in enumerate(JSON)}
    for name, path in files.items():
        path.write_bytes(JSON[name].encode("utf-8", "surrogateescape"))
    for name, target in (("a device", "/dev/zero"), ("no file", "nowhere")):
        files[name] = tmp_path / f"{name[-4:]}.json"
        files[name].symlink_to(target)
    files["a sparse terabyte"] = tmp_path / "sparse.json"
    with open(files["a sparse terabyte"], "wb") as file:
        file.truncate(2**40)
    assert complaints("common.untrusted.strict_json:read_json_object", tmp_path / "valid.json", files) == []


@pytest.mark.parametrize("name", ["nested lists", "nested objects", "a number of a million digits", "empty"])
def test_large_json_is_read_by_its_own_bounds(tmp_path, name):
    (tmp_path / "a.json").write_text(JSON[name])
    with pytest.raises(DataError, match=r"a\.json"):
        read_large_json(tmp_path / "a.json")


def test_messages_of_readers_end_with_the_remedy(tmp_path):
    path = tmp_path / "a.json"
    readers = [read_bytes, read_text, read_json_object]
    for read in readers:
        with pytest.raises(DataError, match=r"a\.json: .*; fetch it"):
            read(path, remedy="fetch it")
    path.write_text(json.dumps([1]))
    with pytest.raises(DataError, match=r"not a JSON object.*; fetch it"):
        read_json_object(path, remedy="fetch it")
    with pytest.raises(DataError, match=r"larger than 2 bytes"):
        read_bytes(path, 2)


def test_a_long_line_is_named(tmp_path):
    read = lines(Path("a"), io.BytesIO(b"abc\nabcdef\n"), 4)
    assert next(read) == b"abc\n"
    with pytest.raises(DataError, match=r"a, line 2: is longer"):
        next(read)


def test_a_gzip_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"abc", mtime=0))
    assert read_gzip(path, 3) == b"abc"
    with pytest.raises(DataError, match=r"a\.gz inflates to more than 2 bytes"):
        read_gzip(path, 2)
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"a\.gz is damaged"):
        read_gzip(path, 3)


def test_a_valid_object_is_parsed():
    assert parse_object('{"a": [1, 2.5, null, {"b": "c"}], "d": -9007199254740993}') == {
        "a": [1, 2.5, None, {"b": "c"}],
        "d": -9007199254740993,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 1}', "it has 'a' twice"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "it has 'b' twice"),
        ("[1]", "not a JSON object"),
        ('{"a": 1', "truncated or corrupt"),
        ('{"a": 1} {}', "truncated or corrupt"),
        ("", "truncated or corrupt"),
        ('{{"a": {}1{}}}'.format("[" * 40, "]" * 40), "nested more than 32 deep"),
        ('{"a": %s}' % ('{"a":' * 15_000), "truncated or corrupt"),
        ('{"a": %s}' % ('{"a":' * 100_000), "more than 20000 entries"),
        ('{"a": %s}' % ("9" * 30), "an integer of 30 digits"),
        ('{"a": %s}' % ("9" * 100_000), "an integer of 100000 digits"),
    ],
)
def test_an_ambiguous_or_excessive_text_is_refused(text, words):
    with pytest.raises(StrictJsonError, match=words):
        parse_object(text)


def test_many_brackets_side_by_side_are_not_deep():
    assert parse_object('{{"a": [{}]}}'.format(", ".join(["[[1]]"] * 100)))["a"][99] == [[1]]
