"""Read large flat files with several threads, bypassing the page cache (O_DIRECT), in order and with lookahead.

Direct reads start and end at multiples of :data:`common.data.aligned_buffers.ALIGNMENT`. An unaligned range is read
with the blocks around it, and returned as a view of the requested part. If the file system does not support direct
reads, the page cache is used, and a message says so.
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

from common.data.aligned_buffers import ALIGNMENT, AlignedBuffer, AlignedBuffers, Awaited, aligned
from common.data.threads import ahead as begun_ahead
from common.errors import DataError

PIECE_BYTES = 8 << 20
AHEAD = 8
THREADS = 8
"""Number of concurrent reads that keeps a striped set of disks busy."""

Mode = Literal["auto", "direct", "buffered"]
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""Error codes of O_DIRECT, or of the first read with it, on file systems without direct reads."""

_direct: set[int] = set()
"""Device numbers of file systems that this process has read past the page cache, in mode ``auto``."""
_reported: set[int] = set()
"""Device numbers of file systems for which this process has printed that they lack direct reads."""


class NoDirectReads(DataError):
    """The file system does not support direct reads."""


@dataclass(frozen=True)
class FilePiece:
    """Consecutive bytes of a file, in a buffer that will be reused.

    Attributes:
        range: number of the range that contains them, from 0.
        offset: position of the first byte in the file.
        values: uint8, [bytes]; a view of ``buffer``, not necessarily aligned.
        buffer: the buffer that contains the bytes.
    """

    range: int
    offset: int
    values: Tensor
    buffer: AlignedBuffer

    def keep_until(self, event: Awaited) -> None:
        """Keep the buffer unchanged until ``event``, e.g. one that is recorded after an asynchronous copy to a GPU."""
        self.buffer.keep_until(event)


class DirectFile:
    """A file opened for direct reads; a context manager. Its size must not change while it is open.

    Args:
        path: a regular file.
        expected_bytes: required size of the file; None accepts any.
        mode: ``direct``: use O_DIRECT or fail; ``buffered``: use the page cache; ``auto``: use O_DIRECT, or else the
            page cache, with a message once per file system.

    Attributes:
        size: size in bytes when the file was opened.
        direct: whether reads bypass the page cache.
        why_buffered: reason why they do not; empty if they do.

    Raises:
        DataError: the file is missing, may not be read, is not a regular file, or has another size.
        NoDirectReads: the mode is ``direct`` and the file system does not support it. :meth:`read` and all methods
            that read may raise it, too.
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
            if mode == "auto" and self.direct and status.st_dev not in _direct:
                self._probe()
                if self.direct:
                    _direct.add(status.st_dev)
            if mode == "auto" and not self.direct and status.st_dev not in _reported:
                _reported.add(status.st_dev)
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
        """Close the file. Reads of :meth:`pieces` in progress continue, because they use a duplicated descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, length: int, buffer: AlignedBuffer) -> Tensor:
        """Read ``length`` bytes from ``offset`` on, with the blocks around them.

        Returns:
            uint8, [length]: a view of ``buffer``, which must have capacity for the whole blocks.

        Raises:
            DataError: the file ends earlier, or cannot be read.
            ValueError: the buffer is too small, or the file is closed.
        """
        return self._read(self._opened(), offset, length, buffer)

    def read_into(self, offset: int, buffer: Tensor, threads: int = THREADS) -> None:
        """Fill ``buffer``, a contiguous host tensor at any address, with the bytes from ``offset`` on.

        Copies the bytes from aligned buffers; :meth:`pieces` avoids this copy.

        Raises:
            DataError: as :meth:`read`.
            ValueError: the tensor is not on the host or not contiguous, or the file is closed.
        """
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError(f"bytes of {self.path} are read into contiguous tensors on the host only")
        filled = buffer.reshape(-1).view(torch.uint8)
        spans = aligned(offset % ALIGNMENT + len(filled))
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
    ) -> Iterator[FilePiece]:
        """Yield the bytes of ``ranges`` in order, as pieces. Reading starts when the first piece is requested.

        A piece stays valid while the caller takes the next ``ahead`` pieces. Its buffer is reused after that, but not
        before the event of :meth:`FilePiece.keep_until`.

        Args:
            ranges: offset and length of each range, in bytes; an empty range has no piece.
            piece_bytes: maximum bytes of one read, a multiple of :data:`ALIGNMENT`.
            ahead: number of pieces that are read in advance.
            unit: every piece is a multiple of this number of bytes, e.g. the size of a row.
            buffers: at least ``2 * ahead + 1`` buffers of ``piece_bytes`` that are not used otherwise. Default: new
                buffers, pinned if this process sees a GPU.

        Raises:
            DataError: a range ends after the end of the file (raised at once); or the file has become shorter or
                cannot be read (raised instead of the piece).
            ValueError: the sizes contradict each other, or the file is closed.
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
    ) -> Iterator[FilePiece]:
        with contextlib.ExitStack() as ending:
            descriptor = os.dup(self._opened())
            ending.callback(os.close, descriptor)
            buffers = given or ending.enter_context(AlignedBuffers(2 * ahead + 1, piece_bytes))
            pool = ThreadPoolExecutor(threads, thread_name_prefix="direct-reader")
            ending.callback(pool.shutdown, wait=True, cancel_futures=True)

            def read(index: int, offset: int, length: int, buffer: AlignedBuffer) -> FilePiece:
                buffer.wait()
                return FilePiece(index, offset, self._read(descriptor, offset, length, buffer), buffer)

            begun = (pool.submit(read, *cut, buffers[turn % (2 * ahead + 1)]) for turn, cut in enumerate(cuts))
            for piece in begun_ahead(begun, ahead, Future.cancel):
                yield piece.result()

    def _read(self, descriptor: int, offset: int, length: int, buffer: AlignedBuffer) -> Tensor:
        self._check(offset, length)
        first = offset // ALIGNMENT * ALIGNMENT
        head = offset - first
        span = aligned(head + length)
        if span > buffer.size:
            raise ValueError(f"{length} bytes at {offset} of {self.path} lie in blocks of {span}, beyond {buffer.size}")
        wanted, filled = min(span, self.size - first) if length else 0, 0
        while filled < wanted:
            got = self._read_blocks(descriptor, buffer.blocks[filled:span], first + filled)
            if filled + got >= wanted:
                break
            # A short read inside the file is allowed; the next read must start at a block boundary again.
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
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # before open, which would block on a pipe
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
        """Read the first block, because some file systems open a file with O_DIRECT but fail when it is read."""
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


def read_file(path: Path, buffer: AlignedBuffer, expected_bytes: int | None = None, mode: Mode = "auto") -> Tensor:
    """Read a whole file with one read, for files of one sample each. Several threads may call this at a time.

    Args:
        expected_bytes, mode: see :class:`DirectFile`.

    Returns:
        uint8, [size]: a view of ``buffer``, which must have capacity for the size rounded up to :data:`ALIGNMENT`.

    Raises:
        DataError: the file is missing, has another size, or cannot be read.
        ValueError: the buffer is too small.
    """
    with DirectFile(path, expected_bytes, mode) as file:
        return file.read(0, file.size, buffer)


def _cut(ranges: Sequence[tuple[int, int]], piece_bytes: int, unit: int) -> Iterator[tuple[int, int, int]]:
    """Yield range number, offset and length of each piece: whole units, with blocks that fit into ``piece_bytes``."""
    for index, (offset, length) in enumerate(ranges):
        end = offset + length
        while offset < end:
            capacity = offset // ALIGNMENT * ALIGNMENT + piece_bytes - offset
            taken = min(end - offset, capacity // unit * unit)
            yield index, offset, taken
            offset += taken


def _refused(path: Path) -> str:
    return f"the file system of {path} has no reads past the page cache (O_DIRECT)"
