"""Reader for ranges of rows of a prepared file, ahead of their use: with direct I/O, buffered, or memory-mapped."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from common.config.ranges import AtLeast, NotNegative
from common.data.aligned_buffers import ALIGNMENT, AlignedBuffers
from common.data.direct_reader import Mode
from common.data.direct_rows import DirectRows
from common.errors import DataError
from common.recommendation.criteo.sample_rows import WORD


@dataclass(frozen=True, kw_only=True)
class RowReaderSettings:
    """Options for reading prepared files.

    Attributes:
        files: ``direct``: only with direct I/O, past the page cache; ``buffered``: through the page cache; ``auto``:
            direct if the file system supports it; ``mapped``: memory map, read by the calling thread, for small
            files.
        ahead: batches that are read ahead.
        resident_gb: decoded evaluation batches stay on the device after the first pass if those of this rank need at
            most this many GB (1e9 bytes); 0: they are read again each time.
    """

    files: Literal["auto", "direct", "buffered", "mapped"] = "auto"
    ahead: Annotated[int, AtLeast(1)] = 4
    threads: Annotated[int, AtLeast(1)] = 4
    resident_gb: Annotated[float, NotNegative] = 0.0


class RowFile:
    """A file of rows of int32 words. Its read buffers are kept until it is closed.

    Args:
        rows: expected number of rows.

    Raises:
        DataError: the file is missing, has an incomplete row, or another number of rows.
    """

    def __init__(self, path: Path, words: int, rows: int, settings: RowReaderSettings) -> None:
        mode: Mode = "buffered" if settings.files == "mapped" else settings.files
        self._rows = DirectRows.headerless(path, torch.int32, (words,), rows, mode)
        self._settings, self._words = settings, words
        self._buffers: AlignedBuffers | None = None
        self._reading: Generator[Tensor] | None = None
        self._mapped_NW: Tensor | None = None
        if settings.files == "mapped":
            flat = torch.from_file(str(path), shared=False, size=rows * words, dtype=torch.int32)
            self._mapped_NW = flat.view(rows, words)

    def read(self, ranges: Sequence[tuple[int, int]], pinned: bool) -> Iterator[Tensor]:
        """Yield the rows of each range, int32 (last - first, words), in this order; end an earlier read.

        The rows stay valid until the next range is requested, and until the copies that are queued on the current
        stream at that time are done.

        Args:
            ranges: first row of each range, and last row + 1; none is empty.
            pinned: use memory that is pinned for the current GPU, for asynchronous copies.

        Raises:
            DataError: there are fewer rows; the file has become shorter, or cannot be read.
        """
        if self._reading is not None:
            self._reading.close()
        last_row = max((last for _, last in ranges), default=0)
        if last_row > len(self._rows):
            raise DataError(f"{self._rows.file.path} has {len(self._rows):,} rows, too few for row {last_row - 1:,}")
        self._reading = self._read_ahead(ranges, pinned) if self._mapped_NW is None else self._read_mapped(ranges)
        return self._reading

    def close(self) -> None:
        """Stop reading and close the file."""
        if self._reading is not None:
            self._reading.close()
        if self._buffers is not None:
            self._buffers.close()
        self._rows.close()
        self._mapped_NW = self._buffers = self._reading = None

    def _read_mapped(self, ranges: Sequence[tuple[int, int]]) -> Generator[Tensor]:
        for first, last in ranges:
            assert self._mapped_NW is not None
            yield self._mapped_NW[first:last]

    def _read_ahead(self, ranges: Sequence[tuple[int, int]], pinned: bool) -> Generator[Tensor]:
        if not ranges:
            return
        row_bytes, settings = self._words * WORD, self._settings
        buffers = self._ring(max(last - first for first, last in ranges) * row_bytes, pinned)
        byte_ranges = [(first * row_bytes, (last - first) * row_bytes) for first, last in ranges]
        file = self._rows.file
        for piece in file.pieces(byte_ranges, buffers.size, settings.ahead, settings.threads, row_bytes, buffers):
            try:
                yield piece.values.view(torch.int32).view(-1, self._words)
            finally:
                if pinned:
                    copied = torch.cuda.Event()
                    copied.record()
                    piece.keep_until(copied)

    def _ring(self, most: int, pinned: bool) -> AlignedBuffers:
        """Return buffers that each hold a range of ``most`` bytes at any alignment to disk blocks."""
        size = (-(-most // ALIGNMENT) + 2) * ALIGNMENT
        if self._buffers is not None and (self._buffers.size < size or self._buffers.pinned != pinned):
            self._buffers.close()
            self._buffers = None
        if self._buffers is None:
            self._buffers = AlignedBuffers(2 * self._settings.ahead + 1, size, pin_memory=pinned)
        return self._buffers
