"""Members of tars, and tars that end where they should not."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from common.errors import DataError
from common.formats.raw_files import add_member, data_members

CONTENTS = {"a.bin": b"x" * 700, "b.bin": b"", "c.bin": b"y" * 512}


def _tar(**options: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as tar:
        for name, content in CONTENTS.items():
            add_member(tar, name, content)
    return file.getvalue()


def _found(content: bytes, start: int = 0) -> dict[str, bytes]:
    file = io.BytesIO(content)
    return {name: content[at : at + size] for name, at, size in data_members(file, Path("made.tar"), start)}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("start", [0, 100])
def test_members_are_where_they_are_said_to_be(format, start):
    assert _found(b"-" * start + _tar(format=format), start) == CONTENTS


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_a_folder_without_a_name_are_found(format, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        tar.add(folder, arcname="")

    content = file.getvalue()

    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getmembers()[0].name == ""
    assert _found(content) == CONTENTS


@pytest.mark.parametrize("end", [300, 1000, 1536, 2048, 3071])
def test_tars_that_are_cut_off_are_refused(end):
    with pytest.raises(DataError, match=r"made\.tar: the tar at byte 0 is truncated or damaged"):
        _found(_tar()[:end])


def test_a_damaged_header_is_not_taken_for_the_end():
    content = bytearray(_tar())
    place = content.index(b"b.bin")
    content[place] ^= 255

    with pytest.raises(DataError, match=rf"made\.tar: the tar .* no end mark at byte {place}"):
        _found(bytes(content))
