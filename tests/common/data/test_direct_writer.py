"""Files written past the page cache: every byte, alignment, file systems without direct writes, full disks."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.data import direct_writer
from common.data.aligned_buffers import ALIGNMENT, AlignedBuffer, AlignedBuffers
from common.data.direct_writer import write_file

CAPACITY = 4 * ALIGNMENT


@pytest.fixture
def buffer() -> AlignedBuffer:
    """A buffer with remains of another file."""
    buffer = AlignedBuffers(1, CAPACITY, pin_memory=False)[0]
    buffer.values.fill_(255)
    return buffer


@pytest.fixture
def nothing_reported() -> Iterator[None]:
    """No file system has been reported to lack direct writes."""
    before = set(direct_writer._reported)
    direct_writer._reported.clear()
    yield
    direct_writer._reported.clear()
    direct_writer._reported.update(before)


@pytest.mark.parametrize("size", [0, 1, ALIGNMENT, CAPACITY - 1, CAPACITY, CAPACITY + 1, 9 * ALIGNMENT + 77])
def test_pieces_of_any_size_become_one_file(size, buffer, tmp_path):
    draw = random.Random(size)
    whole = draw.randbytes(size)
    cuts = [0, *sorted(draw.choices(range(size + 1), k=5)), size]
    pieces = [whole[start:stop] for start, stop in itertools.pairwise(cuts)]
    assert write_file(tmp_path / "folder" / "file", pieces, buffer) == size
    assert (tmp_path / "folder" / "file").read_bytes() == whole


@pytest.mark.usefixtures("nothing_reported")
def test_writes_are_of_whole_blocks_and_ask_for_no_page_cache(buffer, tmp_path, monkeypatch):
    seen = []
    pwrite = os.pwrite

    def watched(descriptor: int, blocks: memoryview, offset: int) -> int:
        address = torch.frombuffer(blocks, dtype=torch.uint8).data_ptr()
        written = pwrite(descriptor, blocks, offset)
        direct = bool(direct_writer.fcntl.fcntl(descriptor, direct_writer.fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((offset, len(blocks), address % ALIGNMENT, direct))
        return written

    monkeypatch.setattr(os, "pwrite", watched)
    write_file(tmp_path / "file", [bytes(CAPACITY), bytes(ALIGNMENT), b"x"], buffer)
    direct = not direct_writer._reported  # else this file system refused, which the next tests are about
    assert seen == [(0, CAPACITY, 0, direct), (CAPACITY, 2 * ALIGNMENT, 0, direct)]


def refuse_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system refuse O_DIRECT after the file was created, as Linux does."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *rest, **others))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **others)

    monkeypatch.setattr(os, "open", refusing)


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system open files for direct writes, and refuse the first write."""
    real, o_direct = os.pwrite, os.O_DIRECT

    def refusing(descriptor: int, blocks: memoryview, offset: int) -> int:
        if direct_writer.fcntl.fcntl(descriptor, direct_writer.fcntl.F_GETFL) & o_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, blocks, offset)

    monkeypatch.setattr(os, "pwrite", refusing)


@pytest.mark.usefixtures("nothing_reported")
@pytest.mark.parametrize("refuse", [refuse_opening, refuse_writing])
def test_a_file_system_without_direct_writes_uses_the_page_cache_and_says_so_once(
    refuse, buffer, tmp_path, monkeypatch, capsys
):
    refuse(monkeypatch)
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(fsync(descriptor)))
    for name in ("one", "two"):
        write_file(tmp_path / name, [bytes(CAPACITY), b"end"], buffer)
        assert (tmp_path / name).read_bytes() == bytes(CAPACITY) + b"end"
    assert len(flushed) == 2
    assert capsys.readouterr().err.count("is written through the page cache") == 1


def test_an_existing_file_stays(buffer, tmp_path):
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [b"after"], buffer)
    assert (tmp_path / "file").read_bytes() == b"before"


def test_a_full_disk_is_an_error_that_names_the_file(buffer, tmp_path):
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * ALIGNMENT, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failure:
            write_file(tmp_path / "file", [bytes(3 * CAPACITY)], buffer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert failure.value.filename == str(tmp_path / "file")
