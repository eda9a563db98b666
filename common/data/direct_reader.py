"""Large flat files, read past the page cache (O_DIRECT) by several threads, in order and a few pieces ahead.

Direct reads start and end at multiples of :data:`common.data.aligned_buffers.ALIGNMENT`. A range that doesn't is read
with the blocks around it, and handed on as the part of the buffer that was asked for. A file system that has no direct
reads is read through the page cache, which is printed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from common.data.ahead import ahead as begun_ahead
from common.data.aligned_buffers import ALIGNMENT, AlignedBuffer, AlignedBuffers, Awaited
from common.errors import DataError

PIECE_BYTES = 8 << 20
AHEAD = 8
THREADS = 8
"""Reads in flight that keep a striped set of disks busy."""

Mode = Literal["auto", "direct", "buffered"]
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""What the system says to O_DIRECT, or to the first read with it, where a file system has no direct reads."""

_said: set[int] = set()
"""File systems (device numbers) whose lack of direct reads this process has printed."""


class NoDirectReads(DataError):
    """The file system has no reads past the page cache."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, in a buffer that will be filled again.

    Attributes:
        range: which of the ranges, from 0.
        offset: of the first byte in the file.
        values: uint8, [bytes]; a view of the buffer, at any address.
        buffer: that buffer.
    """

    range: int
    offset: int
    values: Tensor
    buffer: AlignedBuffer

    def keep_until(self, event: Awaited) -> None:
        """Leave the buffer as it is until ``event``, such as one recorded behind an asynchronous copy to a GPU."""
        self.buffer.keep_until(event)


class DirectFile:
    """A file that is open for reading past the page cache; a context manager. Its size is that of when it was opened.

    Args:
        path: a regular file.
        expected_bytes: what its size must be.
        mode: ``direct``: with O_DIRECT or not at all; ``buffered``: through the page cache; ``auto``: with O_DIRECT,
            and through the page cache where the file system refuses it, which is printed once for each file system.

    Attributes:
        path: as given.
        size: bytes.
        direct: whether it is read past the page cache.
        why_buffered: why it is not; empty if it is.

    Raises:
        DataError: the file is missing, may not be read, is no regular file, or has another size.
        NoDirectReads: ``direct``, and the file system has none; :meth:`read` and all that reads may raise it too.
    """

    def __init__(self, path: Path, expected_bytes: int | None = None, mode: Mode = "auto") -> None:
        self.path = path
        self.direct = mode != "buffered"
        self.why_buffered = "" if self.direct else "buffered reads were asked for"
        self._descriptor = self._open(mode)
        try:
            status = os.fstat(self._descriptor)
            self.size = status.st_size
            if expected_bytes is not None and self.size != expected_bytes:
                raise DataError(f"{path} has {self.size:,} bytes and not {expected_bytes:,}; fetch or prepare it again")
            if mode == "auto" and self.direct:
                self._probe()
            if mode == "auto" and not self.direct and status.st_dev not in _said:
                _said.add(status.st_dev)
                print(f"{path} is read through the page cache: {self.why_buffered}", file=sys.stderr, flush=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; pieces that are being read have a descriptor of their own."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, length: int, buffer: AlignedBuffer) -> Tensor:
        """Read ``length`` bytes from ``offset`` on, with the blocks around them.

        Returns:
            uint8, [length]: a view of ``buffer``, which has room for the blocks.

        Raises:
            DataError: the file ends before, or cannot be read.
            ValueError: the buffer is too small, or the file is closed.
        """
        return self._read(self._opened(), offset, length, buffer)

    def read_into(self, offset: int, buffer: Tensor, threads: int = THREADS) -> None:
        """Fill ``buffer``, a contiguous host tensor at any address, with the bytes from ``offset`` on.

        They are copied from aligned memory; :meth:`pieces` hands that on without a copy.

        Raises:
            DataError: as :meth:`read`.
            ValueError: the tensor is not on the host or not contiguous, or the file is closed.
        """
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"bytes of {self.path} are read into contiguous tensors on the host only")
        filled = buffer.reshape(-1).view(torch.uint8)
        spans = -(-(offset % ALIGNMENT + len(filled)) // ALIGNMENT) * ALIGNMENT
        count = -(-spans // PIECE_BYTES)
        ahead = min(threads, count) - 1 if count else 0
        with AlignedBuffers(2 * ahead + 1, max(ALIGNMENT, min(PIECE_BYTES, spans)), pin_memory=False) as buffers:
            for piece in self.pieces([(offset, len(filled))], buffers.size, ahead, threads, buffers=buffers):
                start = piece.offset - offset
                filled[start : start + len(piece.values)] = piece.values

    def pieces(
        self,
        ranges: Sequence[tuple[int, int]],
        piece_bytes: int = PIECE_BYTES,
        ahead: int = AHEAD,
        threads: int = THREADS,
        unit: int = 1,
        buffers: AlignedBuffers | None = None,
    ) -> Iterator[Piece]:
        """Read ranges of the file in their order; nothing is read before the first piece is asked for.

        A piece stays as it is while the following ``ahead`` pieces are taken: its buffer is filled again when the one
        after those is asked for, or after the event of :meth:`Piece.keep_until`, whichever is later.

        Args:
            ranges: offset and length of each, in bytes; an empty one has no piece.
            piece_bytes: most that is read at a time, a multiple of :data:`ALIGNMENT`.
            ahead: pieces that are on their way beside the one that is handed on.
            threads: that read.
            unit: bytes that are not separated, such as a row: every piece has a whole number of them.
            buffers: at least ``2 * ahead + 1`` of ``piece_bytes``, which nothing else uses meanwhile; made, and pinned
                where this process sees a GPU, if not given.

        Raises:
            DataError: a range goes beyond the end of the file, which is seen at once; or where the piece would be
                handed on: the file has become shorter or cannot be read.
            ValueError: sizes that don't fit one another, or the file is closed.
        """
        for offset, length in ranges:
            self._check(offset, length)
            if length % unit:
                raise ValueError(f"{length} bytes of {self.path} are no whole number of {unit} bytes")
        if piece_bytes < ALIGNMENT or piece_bytes % ALIGNMENT or ahead < 0 or threads < 1:
            raise ValueError(
                f"pieces of {piece_bytes} bytes, {ahead} ahead, {threads} threads: pieces of a multiple of {ALIGNMENT} "
                "bytes, none or more ahead, and at least one thread"
            )
        if unit > piece_bytes - ALIGNMENT + 1:
            raise ValueError(f"pieces of {piece_bytes} bytes cannot hold {unit} that are not to be separated")
        if buffers is not None and (len(buffers) < 2 * ahead + 1 or buffers.size < piece_bytes):
            raise ValueError(
                f"{len(buffers)} buffers of {buffers.size} bytes, and {2 * ahead + 1} of {piece_bytes} are needed"
            )
        self._opened()
        return self._pieces(_cut(ranges, piece_bytes, unit), piece_bytes, ahead, threads, buffers)

    def _pieces(
        self,
        cuts: Iterator[tuple[int, int, int]],
        piece_bytes: int,
        ahead: int,
        threads: int,
        given: AlignedBuffers | None,
    ) -> Iterator[Piece]:
        with contextlib.ExitStack() as ending:
            descriptor = os.dup(self._opened())
            ending.callback(os.close, descriptor)
            buffers = given or ending.enter_context(AlignedBuffers(2 * ahead + 1, piece_bytes))
            pool = ThreadPoolExecutor(threads, thread_name_prefix="direct-reader")
            ending.callback(pool.shutdown, wait=True, cancel_futures=True)

            def read(index: int, offset: int, length: int, buffer: AlignedBuffer) -> Piece:
                buffer.wait()
                return Piece(index, offset, self._read(descriptor, offset, length, buffer), buffer)

            begun = (pool.submit(read, *cut, buffers[turn % (2 * ahead + 1)]) for turn, cut in enumerate(cuts))
            for piece in begun_ahead(begun, ahead, Future.cancel):
                yield piece.result()

    def _read(self, descriptor: int, offset: int, length: int, buffer: AlignedBuffer) -> Tensor:
        self._check(offset, length)
        first = offset // ALIGNMENT * ALIGNMENT
        head = offset - first
        span = -(-(head + length) // ALIGNMENT) * ALIGNMENT
        if span > buffer.size:
            raise ValueError(f"{length} bytes at {offset} of {self.path} lie in blocks of {span}, beyond {buffer.size}")
        wanted, filled = min(span, self.size - first) if length else 0, 0
        while filled < wanted:
            got = self._read_blocks(descriptor, buffer.blocks[filled:span], first + filled)
            if filled + got >= wanted:
                break
            # A short read inside the file is allowed; the next one has to start at a block again.
            if got < ALIGNMENT:
                raise DataError(
                    f"{self.path} ends at byte {first + filled + got:,}, where {length:,} bytes at offset {offset:,} "
                    f"are read; it had {self.size:,} bytes when it was opened. See what shortens it, or fetch it again"
                )
            filled += got // ALIGNMENT * ALIGNMENT
        return buffer.values[head : head + length]

    def _read_blocks(self, descriptor: int, blocks: memoryview, offset: int) -> int:
        try:
            return os.preadv(descriptor, [blocks], offset)
        except OSError as error:
            if self.direct and error.errno in REFUSALS:
                raise NoDirectReads(_refused(self.path)) from error
            raise DataError(f"{self.path} cannot be read at offset {offset:,}: {error.strerror}") from error

    def _open(self, mode: Mode) -> int:
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # asked before a pipe would wait for its other end
                raise DataError(f"{self.path} is no regular file; give a file of data")
            if self.direct:
                try:
                    return os.open(self.path, os.O_RDONLY | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in REFUSALS:
                        raise
                    if mode == "direct":
                        raise NoDirectReads(_refused(self.path)) from error
                    self._use_page_cache()
            return os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.path} cannot be opened: {error.strerror}; fetch or prepare it") from error

    def _probe(self) -> None:
        """Read the first block: some file systems open a file with O_DIRECT and refuse to read it, or want more."""
        with mmap.mmap(-1, ALIGNMENT) as block:
            try:
                os.preadv(self._descriptor, [block], 0)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise DataError(f"{self.path} cannot be read at offset 0: {error.strerror}") from error
                self._use_page_cache()
                self.close()
                self._descriptor = self._open("buffered")

    def _use_page_cache(self) -> None:
        self.direct = False
        self.why_buffered = _refused(self.path)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0:
            raise ValueError(f"{length} bytes at offset {offset} of {self.path}")
        if offset + length > self.size:
            raise DataError(
                f"{self.path} has {self.size:,} bytes, too few for {length:,} at offset {offset:,}; "
                "fetch or prepare it again"
            )

    def _opened(self) -> int:
        if self._descriptor < 0:
            raise ValueError(f"{self.path} has been closed")
        return self._descriptor


def _cut(ranges: Sequence[tuple[int, int]], piece_bytes: int, unit: int) -> Iterator[tuple[int, int, int]]:
    """Number of the range, offset and length of each piece: whole units, whose blocks are within ``piece_bytes``."""
    for index, (offset, length) in enumerate(ranges):
        end = offset + length
        while offset < end:
            room = offset // ALIGNMENT * ALIGNMENT + piece_bytes - offset
            taken = min(end - offset, room // unit * unit)
            yield index, offset, taken
            offset += taken


def _refused(path: Path) -> str:
    return f"the file system of {path} has no reads past the page cache (O_DIRECT)"
