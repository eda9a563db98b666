"""Ranges of rows of a prepared file, one behind the other, read ahead: past the page cache or from a memory map."""

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
class ReaderSettings:
    """How prepared files are read.

    Attributes:
        files: ``direct``: past the page cache or not at all; ``buffered``: through it; ``auto``: past it where the file
            system can; ``mapped``: from a memory map, by the thread that asks, which suits small files.
        ahead: batches that are read ahead of the one that is handed on.
        threads: that read.
        resident_gb: evaluation batches stay on the device after the first pass, decoded, if those of this rank take no
            more than so many GB (1e9 bytes); 0: they are read anew each time.
    """

    files: Literal["auto", "direct", "buffered", "mapped"] = "auto"
    ahead: Annotated[int, AtLeast(1)] = 4
    threads: Annotated[int, AtLeast(1)] = 4
    resident_gb: Annotated[float, NotNegative] = 0.0


class RowFile:
    """A file of rows of int32 words; the memory that it is read into is kept until it is closed.

    Args:
        path: the file.
        words: of a row.
        rows: how many there must be.
        settings: how it is read.

    Raises:
        DataError: the file is missing, no whole number of rows, or has not so many.
    """

    def __init__(self, path: Path, words: int, rows: int, settings: ReaderSettings) -> None:
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
        """Yield the rows of each range, int32 (last - first, words), in the order given; ends what is still being read.

        They stay as they are until the next range is asked for, and until what is then queued on the current stream has
        read them.

        Args:
            ranges: first row of each, and the row behind its last one; none is empty.
            pinned: whether the memory is pinned for a GPU, the current device, and read by copies that nobody waits
                for.

        Raises:
            DataError: there are not so many rows; the file has become shorter, or cannot be read.
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
        places = [(first * row_bytes, (last - first) * row_bytes) for first, last in ranges]
        file = self._rows.file
        for piece in file.pieces(places, buffers.size, settings.ahead, settings.threads, row_bytes, buffers):
            try:
                yield piece.values.view(torch.int32).view(-1, self._words)
            finally:
                if pinned:
                    copied = torch.cuda.Event()
                    copied.record()
                    piece.keep_until(copied)

    def _ring(self, most: int, pinned: bool) -> AlignedBuffers:
        """Buffers that each hold a range of ``most`` bytes, however its ends lie to the blocks of the disk."""
        size = (-(-most // ALIGNMENT) + 2) * ALIGNMENT
        if self._buffers is not None and (self._buffers.size < size or self._buffers.pinned != pinned):
            self._buffers.close()
            self._buffers = None
        if self._buffers is None:
            self._buffers = AlignedBuffers(2 * self._settings.ahead + 1, size, pin_memory=pinned)
        return self._buffers
