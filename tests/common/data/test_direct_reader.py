"""Files read past the page cache: every byte, buffers that stay, file systems without direct reads, damaged files."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.data import direct_reader
from common.data.aligned_buffers import ALIGNMENT, AlignedBuffers, aligned
from common.data.direct_reader import DirectFile, FilePiece, FileReader, NoDirectReads, read_file
from common.errors import DataError, DeviceError

SIZE = 37 * ALIGNMENT + 1234
PIECE = 4 * ALIGNMENT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of random bytes that ends within a block."""
    path = tmp_path / "data"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.fixture(params=["auto", "buffered"])
def file(request: pytest.FixtureRequest, path: Path) -> Iterator[DirectFile]:
    """That file, past the page cache where temporary files can be read so, and through it."""
    with DirectFile(path, mode=request.param) as opened:
        yield opened


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """It is not known of any file system whether it has direct reads."""
    known = (direct_reader._reported, direct_reader._direct)
    before = [set(devices) for devices in known]
    for devices in known:
        devices.clear()
    yield
    for devices, earlier in zip(known, before, strict=True):
        devices.clear()
        devices.update(earlier)


def has_direct_reads(path: Path) -> bool:
    """Whether the file system opens and reads with O_DIRECT; asked without the reader."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    with AlignedBuffers(1, ALIGNMENT, pin_memory=False) as buffers:
        try:
            return os.preadv(descriptor, [buffers[0].blocks], 0) > 0
        except OSError:
            return False
        finally:
            os.close(descriptor)


def content(values: Tensor) -> bytes:
    return values.numpy().tobytes()


def joined(pieces: Iterator[FilePiece], ranges: list[tuple[int, int]]) -> list[bytes]:
    """The bytes of each range, put together as its pieces come; each must begin where the last one ended."""
    found = [b""] * len(ranges)
    last = 0
    for piece in pieces:
        assert piece.range >= last
        last = piece.range
        assert piece.offset == ranges[last][0] + len(found[last])
        assert 0 < len(piece.values) <= PIECE
        found[last] += content(piece.values)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_random_ranges_have_the_bytes_of_a_plain_read(file, path, threads, ahead):
    draw = random.Random(100 * threads + ahead)
    edges = [0, 1, ALIGNMENT - 1, ALIGNMENT, PIECE - 1, PIECE, PIECE + 1, SIZE - 1, SIZE]
    ends = [(a, b) for a in edges for b in edges if a <= b]
    ends += [tuple(sorted(draw.choices(range(SIZE + 1), k=2))) for _ in range(60)]
    ranges = [(start, stop - start) for start, stop in ends]
    plain = path.read_bytes()
    found = joined(file.pieces(ranges, PIECE, ahead, threads), ranges)
    assert found == [plain[start : start + length] for start, length in ranges]


def test_direct_reads_are_used_if_the_file_system_has_them(path):
    with DirectFile(path) as file:
        assert file.direct == has_direct_reads(path)
        assert bool(file.why_buffered) != file.direct
        assert file.size == SIZE


def test_reads_are_of_whole_blocks_each_once(path, monkeypatch):
    seen = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        address = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
        seen.append((offset, len(buffers[0]), address % ALIGNMENT))
        return preadv(descriptor, buffers, offset)

    with DirectFile(path, mode="buffered") as file:
        monkeypatch.setattr(os, "preadv", watched)
        for _ in file.pieces([(5000, SIZE - 5000)], PIECE, 2, 3):
            pass
    first = 5000 // ALIGNMENT * ALIGNMENT
    end = -(-SIZE // ALIGNMENT) * ALIGNMENT
    assert sorted(seen) == [(start, min(PIECE, end - start), 0) for start in range(first, end, PIECE)]


@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_a_whole_file_is_read_with_one_read(path, mode, monkeypatch):
    seen = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, len(buffers[0])))
        return preadv(descriptor, buffers, offset)

    direct = has_direct_reads(path)
    with AlignedBuffers(1, aligned(SIZE), pin_memory=False) as buffers:
        read_file(path, buffers[0], SIZE, mode)  # in mode auto, the first one probes the file system
        buffers[0].values.zero_()
        monkeypatch.setattr(os, "preadv", watched)
        assert content(read_file(path, buffers[0], SIZE, mode)) == path.read_bytes()
        with pytest.raises(DataError, match=f"{path} has {SIZE:,} bytes and not {SIZE - 1:,}"):
            read_file(path, buffers[0], SIZE - 1, mode)
    if mode == "buffered" or direct:
        assert seen == [(0, aligned(SIZE))]


def test_each_thread_reads_whole_files_into_its_own_buffer(path):
    (path.parent / "empty").touch()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    reader = FileReader("auto", SIZE)
    assert not len(reader.read(path.parent / "empty"))
    found = reader.read(path, SIZE)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reader.read, other).result() == other.read_bytes()
    assert found == path.read_bytes()
    assert reader.read(other) == found == other.read_bytes()  # the same thread overwrites its buffer


def test_a_file_larger_than_the_largest_is_refused_unread(path):
    with pytest.raises(DataError, match=f"^{path} has {SIZE:,} bytes, more than {SIZE - 1:,}; fetch or prepare"):
        FileReader("auto", SIZE - 1).read(path)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_any_tensor_on_the_host_is_filled(file, path, dtype, threads, monkeypatch):
    monkeypatch.setattr(direct_reader, "PIECE_BYTES", PIECE)
    plain = path.read_bytes()
    draw = random.Random(threads)
    for _ in range(20):
        count = draw.randrange(SIZE // 8)
        offset = draw.randrange(SIZE - count * dtype.itemsize + 1)
        around = torch.zeros(count + 2, dtype=dtype)
        file.read_into(offset, around[1 : count + 1], threads)
        assert content(around[1 : count + 1]) == plain[offset : offset + count * dtype.itemsize]
        assert not around[0]
        assert not around[-1]


def test_tensors_elsewhere_are_refused(file):
    with pytest.raises(ValueError, match="contiguous tensors on the host"):
        file.read_into(0, torch.zeros(4, 4, dtype=torch.uint8).T)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_pieces_stay_while_those_ahead_are_taken(file, path, ahead):
    plain = path.read_bytes()
    held = []
    for piece in file.pieces([(7, SIZE - 7)], ALIGNMENT, ahead, threads=4):
        held = [*held[-ahead:], piece] if ahead else [piece]
        for kept in held:
            assert content(kept.values) == plain[kept.offset : kept.offset + len(kept.values)]
    assert len(held) == ahead + 1


def test_buffers_are_filled_again(file):
    addresses = [piece.buffer.values.data_ptr() for piece in file.pieces([(0, SIZE)], ALIGNMENT, 1, 1)]
    assert len(addresses) == 38
    assert addresses[3:] == addresses[:-3]
    assert len(set(addresses)) == 3


class Snapshot:
    """Stands for a copy that something else makes: sees the piece only when it is waited for."""

    def __init__(self, piece: FilePiece) -> None:
        self.piece = piece
        self.seen = b""

    def synchronize(self) -> None:
        self.seen = content(self.piece.values)


def test_a_piece_is_kept_until_its_event(file, path):
    plain = path.read_bytes()
    copies = []
    for piece in file.pieces([(0, SIZE)], PIECE, 1, 4):
        copies.append(Snapshot(piece))
        piece.keep_until(copies[-1])
    assert [copy.seen for copy in copies] == [plain[start : start + PIECE] for start in range(0, SIZE, PIECE)]


def test_at_most_the_given_number_of_pieces_is_read_ahead(file, monkeypatch):
    seen = []
    preadv = os.preadv
    begun = threading.Semaphore(0)

    def watched(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.append(offset)
        begun.release()
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    pieces = file.pieces([(0, SIZE)], ALIGNMENT, ahead=3, threads=8)
    assert not seen
    next(pieces)
    for _ in range(4):
        assert begun.acquire(timeout=60)
    pieces.close()
    assert sorted(seen) == [index * ALIGNMENT for index in range(4)]


def test_given_buffers_are_used_again_for_another_file(file, path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[::-1])
    with AlignedBuffers(3, PIECE, pin_memory=False) as buffers, DirectFile(other) as second:
        memory = {buffer.values.data_ptr() for buffer in (buffers[0], buffers[1], buffers[2])}
        for opened in (file, second):
            found = b""
            for piece in opened.pieces([(3, SIZE - 3)], PIECE, 1, 2, buffers=buffers):
                found += content(piece.values)
                assert piece.buffer.values.data_ptr() in memory
            assert found == opened.path.read_bytes()[3:]


def test_units_are_not_separated(file, path):
    unit = 1000
    count = SIZE // unit - 1
    found = b""
    for piece in file.pieces([(77, count * unit)], PIECE, 2, 4, unit=unit):
        assert len(piece.values) % unit == 0
        assert len(piece.values) >= unit
        found += content(piece.values)
    assert found == path.read_bytes()[77 : 77 + count * unit]


def test_all_descriptors_are_closed(path, monkeypatch):
    before = descriptors()
    with DirectFile(path) as file:
        whole = file.pieces([(0, SIZE)], PIECE)
        assert sum(len(piece.values) for piece in whole) == SIZE
        cut_short = file.pieces([(0, SIZE)], PIECE)
        next(cut_short)
        assert descriptors() == before + 2
        cut_short.close()
        assert descriptors() == before + 1
        broken = file.pieces([(0, SIZE)], PIECE)
        monkeypatch.setattr(os, "preadv", lambda *arguments: 0)
        with pytest.raises(DataError):
            next(broken)
        monkeypatch.undo()
        assert descriptors() == before + 1
    for wrong in ({"expected_bytes": 1}, {"mode": "direct", "expected_bytes": 1}):
        with pytest.raises(DataError):
            DirectFile(path, **wrong)
    assert descriptors() == before


def test_a_closed_file_is_read_to_the_end_by_those_who_began(path):
    file = DirectFile(path)
    pieces = file.pieces([(0, SIZE)], PIECE, 0, 1)
    found = content(next(pieces).values)
    file.close()
    assert found + b"".join(content(piece.values) for piece in pieces) == path.read_bytes()
    with pytest.raises(ValueError, match="has been closed"):
        file.pieces([(0, 1)])


def refuse_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file system without direct reads does."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **others)

    monkeypatch.setattr(os, "open", refusing)


def refuse_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one does that takes the flag and not the read."""
    opened: set[int] = set()
    real_open, real_preadv, real_dup, o_direct = os.open, os.preadv, os.dup, os.O_DIRECT

    def opening(path: Any, flags: int, *rest: Any, **others: Any) -> int:
        descriptor = real_open(path, flags & ~o_direct, *rest, **others)
        (opened.add if flags & o_direct else opened.discard)(descriptor)
        return descriptor

    def doubling(descriptor: int) -> int:
        double = real_dup(descriptor)
        (opened.add if descriptor in opened else opened.discard)(double)
        return double

    def reading(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor in opened:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "dup", doubling)
    monkeypatch.setattr(os, "preadv", reading)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("refuse", [refuse_opening, refuse_reading])
def test_a_file_system_without_direct_reads_is_read_through_the_page_cache_and_reported_once(
    path, refuse, monkeypatch, capsys
):
    refuse(monkeypatch)
    before = descriptors()
    for _ in range(2):
        with DirectFile(path) as file:
            assert not file.direct
            assert "O_DIRECT" in file.why_buffered
            assert joined(file.pieces([(1, SIZE - 1)], PIECE), [(1, SIZE - 1)]) == [path.read_bytes()[1:]]
    assert capsys.readouterr().err.count(f"{path} is read through the page cache") == 1
    assert descriptors() == before


@pytest.mark.parametrize("refuse", [refuse_opening, refuse_reading])
def test_mode_direct_fails_without_direct_reads(path, refuse, monkeypatch):
    refuse(monkeypatch)

    def read_directly() -> None:
        with DirectFile(path, mode="direct") as file:
            next(file.pieces([(0, SIZE)], PIECE))

    with pytest.raises(NoDirectReads, match=re.escape(f"{path} has no reads past")):
        read_directly()


def test_short_reads_within_the_file_go_on(file, path, monkeypatch):
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % ALIGNMENT == 0
        return min(preadv(descriptor, buffers, offset), max(ALIGNMENT, len(buffers[0]) - ALIGNMENT - 99))

    monkeypatch.setattr(os, "preadv", short)
    ranges = [(3, SIZE - 3)]
    assert joined(file.pieces(ranges, PIECE), ranges) == [path.read_bytes()[3:]]


@pytest.mark.parametrize("left", [0, 1, ALIGNMENT, 10 * ALIGNMENT + 17])
def test_a_file_that_became_shorter_is_one_error(file, path, left):
    os.truncate(path, left)
    message = rf"{re.escape(str(path))} ends at byte {left:,}, where [\d,]+ bytes at offset [\d,]+ are read"
    found = []
    with pytest.raises(DataError, match=message):
        found.extend(piece.offset + len(piece.values) for piece in file.pieces([(0, SIZE)], PIECE))
    assert max(found, default=0) <= left


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_read_error_is_raised_with_its_piece(file, path, number, monkeypatch):
    preadv = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == 2 * PIECE:
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    pieces = file.pieces([(0, SIZE)], PIECE)
    assert [next(pieces).offset for _ in range(2)] == [0, PIECE]
    with pytest.raises(DataError, match=f"{path} cannot be read at offset {2 * PIECE:,}: {os.strerror(number)}"):
        next(pieces)


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE + 1), (SIZE, 1), (SIZE + 5, 0), (SIZE - 9, 10)])
def test_a_range_beyond_the_end_is_seen_at_once(file, path, offset, length):
    message = f"{path} has {SIZE:,} bytes, too few for {length:,} at offset {offset:,}"
    with pytest.raises(DataError, match=message):
        file.pieces([(0, 5), (offset, length)], PIECE)
    with pytest.raises(DataError, match=message):
        file.read_into(offset, torch.empty(length, dtype=torch.uint8))


@pytest.mark.parametrize("mode", ["auto", "direct", "buffered"])
def test_a_path_that_is_no_regular_file_is_an_error(tmp_path, path, mode):
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "nothing": "nothing cannot be opened: No such file",
        ".": "is no regular file",
        "pipe": "pipe is no regular file",
    }.items():
        with pytest.raises(DataError, match=message):
            DirectFile(tmp_path / name, mode=mode)
    if mode != "direct" or has_direct_reads(path):
        with pytest.raises(DataError, match=f"{path} has {SIZE:,} bytes and not {SIZE + 1:,}"):
            DirectFile(path, SIZE + 1, mode)


def test_an_empty_file_has_no_pieces(tmp_path):
    (tmp_path / "empty").touch()
    with DirectFile(tmp_path / "empty", 0) as file:
        assert list(file.pieces([(0, 0)])) == []
        file.read_into(0, torch.empty(0))


def test_sizes_that_do_not_fit_one_another_are_refused(file):
    with AlignedBuffers(2, PIECE, pin_memory=False) as buffers:
        wrong = [
            ({"piece_bytes": ALIGNMENT + 1}, "a multiple of"),
            ({"ahead": -1}, "none or more ahead"),
            ({"threads": 0}, "at least one thread"),
            ({"unit": PIECE, "piece_bytes": PIECE}, "cannot hold"),
            ({"unit": 7}, "no whole number of 7 bytes"),
            ({"buffers": buffers, "piece_bytes": PIECE, "ahead": 1}, "3 of"),
            ({"buffers": buffers, "piece_bytes": 2 * PIECE, "ahead": 0}, "1 of"),
        ]
        for settings, message in wrong:
            with pytest.raises(ValueError, match=message):
                file.pieces([(0, PIECE)], **settings)
        with pytest.raises(ValueError, match="lie in blocks of"):
            file.read(1, PIECE, buffers[0])
    with pytest.raises(ValueError, match="at least 1, of a multiple"):
        AlignedBuffers(1, ALIGNMENT + 8, pin_memory=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_memory_is_not_pinned_without_a_gpu():
    with AlignedBuffers(1, ALIGNMENT) as buffers:
        assert not buffers.pinned
    with pytest.raises(DeviceError, match="sees no GPU"):
        AlignedBuffers(1, ALIGNMENT, pin_memory=True)
