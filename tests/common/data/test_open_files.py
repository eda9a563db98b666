"""Files that stay open: reads at offsets, messages, and the number of open files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.data.open_files import OpenFile, OpenFiles
from common.errors import DataError


def open_descriptors(folder: Path) -> int:
    """Return the number of open files of this process below ``folder``."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link).startswith(str(folder)) for link in links)


def test_reads_return_the_bytes_at_an_offset(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(200)))
    file = OpenFile(tmp_path / "file", "fetch it again")
    assert file.read(10, 5, "sample 1") == bytes(range(10, 15))
    buffer = bytearray(20)
    file.read_into(180, memoryview(buffer)[4:], "sample 2")
    assert buffer == bytes(4) + bytes(range(180, 196))


def test_a_short_file_is_named(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(DataError, match=r"file is cut off: sample 7 ends at byte 110; fetch it again"):
        OpenFile(tmp_path / "file", "fetch it again").read(90, 20, "sample 7")
    with pytest.raises(DataError, match=r"other cannot be opened: No such file or directory; fetch it again"):
        OpenFile(tmp_path / "other", "fetch it again").read(0, 1, "sample 0")


def test_only_the_latest_files_stay_open(tmp_path):
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    files = OpenFiles(2, lambda number: OpenFile(tmp_path / str(number), ""))
    assert [files.file(number).read(0, 1, "")[0] for number in (0, 1, 2, 3, 4, 3)] == [0, 1, 2, 3, 4, 3]
    assert open_descriptors(tmp_path) == 2
    oldest = files.file(4)
    for number in (0, 1):
        assert files.file(number).read(0, 1, "") == bytes([number])
    assert open_descriptors(tmp_path) == 3  # `oldest` is still used
    assert oldest.read(0, 1, "") == b"\x04"
    del oldest
    files.close()
    assert open_descriptors(tmp_path) == 0
