"""Read rows of large flat files as tensors with direct reads: files without a header, and .npy files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from common.data.aligned_buffers import AlignedBuffers, Awaited
from common.data.direct_reader import AHEAD, PIECE_BYTES, THREADS, DirectFile, FilePiece, Mode
from common.errors import DataError
from common.formats import npy


@dataclass(frozen=True)
class RowPiece:
    """Consecutive rows, in a buffer that will be reused.

    Attributes:
        first: number of the first row.
        values: [rows, *row_shape], in the dtype of the rows.
    """

    first: int
    values: Tensor
    piece: FilePiece

    def keep_until(self, event: Awaited) -> None:
        """Keep the rows unchanged until ``event``, e.g. one that is recorded after an asynchronous copy to a GPU."""
        self.piece.keep_until(event)


class DirectRows:
    """Consecutive rows of the same shape and dtype in a file; a context manager that closes the file.

    Create it with :meth:`headerless` or :meth:`from_npy`.

    Args:
        offset: bytes before the first row.
        row_shape: shape of a row; () if a row is one number.
    """

    def __init__(
        self, file: DirectFile, offset: int, dtype: torch.dtype, row_shape: tuple[int, ...], count: int
    ) -> None:
        self.file = file
        self.dtype = dtype
        self.row_shape = row_shape
        self.row_bytes = _row_bytes(dtype, row_shape)
        self._offset = offset
        self._count = count

    @classmethod
    def headerless(
        cls,
        path: Path,
        dtype: torch.dtype,
        row_shape: tuple[int, ...],
        rows: int | None = None,
        mode: Mode = "auto",
    ) -> DirectRows:
        """Open a file that contains only rows, with any file name.

        Args:
            rows: required number of rows; None accepts any.

        Raises:
            DataError: the size is not a multiple of the row size, or not that of ``rows``; the file starts with a
                numpy header; or it cannot be read.
        """
        row_bytes = _row_bytes(dtype, row_shape)
        file = DirectFile(path, mode=mode)
        try:
            count, rest = divmod(file.size, row_bytes)
            begin = torch.zeros(min(len(npy.MAGIC), file.size), dtype=torch.uint8)
            file.read_into(0, begin)
            if bytes(begin.tolist()) == npy.MAGIC:
                raise DataError(f"{path} has numpy's header and is expected to have none; read it as an .npy file")
            if rest:
                raise DataError(
                    f"{path} has {file.size:,} bytes, no whole number of rows of {row_bytes:,} bytes "
                    f"({dtype}, {row_shape}): offset {count * row_bytes:,} begins one that is cut off; fetch it again"
                )
            if rows is not None and count != rows:
                raise DataError(f"{path} has {count:,} rows of {row_bytes:,} bytes and not {rows:,}; fetch it again")
        except BaseException:
            file.close()
            raise
        return cls(file, 0, dtype, row_shape, count)

    @classmethod
    def from_npy(
        cls,
        path: Path,
        dtype: torch.dtype,
        row_shape: tuple[int, ...],
        rows: int | None = None,
    ) -> DirectRows:
        """Open an .npy file with an array [rows, *row_shape].

        For a dtype that numpy lacks (bfloat16, 8-bit floats), the file must have integers of the same size.

        Raises:
            DataError: the header is missing or damaged, or has another dtype, shape or order; the file size does not
                match the header; or the file cannot be read.
        """
        try:
            header = npy.read_header(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as an .npy file: {error}; is it one without a header?") from error
        expected = _numpy_dtypes(dtype)
        if header.dtype not in expected:
            names = " or ".join(kind.str for kind in expected)
            raise DataError(f"{path} holds {header.dtype.str} and not {names} ({dtype}); prepare it again")
        count = header.shape[0] if header.shape else 0
        wrong_count = rows is not None and count != rows
        if not header.shape or header.shape[1:] != row_shape or header.fortran_order or wrong_count:
            found = f"{header.shape}{' in Fortran order' if header.fortran_order else ''}"
            wanted = ", ".join(str(size) for size in ("rows" if rows is None else rows, *row_shape))
            raise DataError(f"{path} holds an array {found} and not ({wanted}) in C order; prepare it again")
        size = header.offset + count * _row_bytes(dtype, row_shape)
        return cls(DirectFile(path, size), header.offset, dtype, row_shape, count)

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> DirectRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def read(
        self,
        first: int,
        last: int,
        piece_bytes: int = PIECE_BYTES,
        ahead: int = AHEAD,
        threads: int = THREADS,
        buffers: AlignedBuffers | None = None,
    ) -> Iterator[RowPiece]:
        """Yield rows ``first`` to ``last`` (exclusive), as many whole rows at a time as fit into a piece.

        Rows stay valid while the caller takes the next ``ahead`` pieces, or longer; see
        :meth:`common.data.direct_reader.DirectFile.pieces`, also for the other arguments.

        Raises:
            DataError: the file has fewer rows, has become shorter, or cannot be read.
            ValueError: the sizes contradict each other.
        """
        if not 0 <= first <= last:
            raise ValueError(f"rows {first} to {last} of {self.file.path}")
        if last > self._count:
            raise DataError(f"{self.file.path} has {self._count:,} rows, too few for rows {first:,} to {last:,}")
        part = (self._offset + first * self.row_bytes, (last - first) * self.row_bytes)
        return self._rows(self.file.pieces([part], piece_bytes, ahead, threads, self.row_bytes, buffers))

    def _rows(self, pieces: Iterator[FilePiece]) -> Iterator[RowPiece]:
        for piece in pieces:
            values = piece.values
            if values.storage_offset() % self.dtype.itemsize:
                values = values.clone()  # numpy aligns the header, but other writers may not
            number = (piece.offset - self._offset) // self.row_bytes
            yield RowPiece(number, values.view(self.dtype).view(-1, *self.row_shape), piece)


def _row_bytes(dtype: torch.dtype, row_shape: tuple[int, ...]) -> int:
    size = math.prod(row_shape) * dtype.itemsize
    if size < 1:
        raise ValueError(f"rows of shape {row_shape} have no bytes")
    return size


def _numpy_dtypes(dtype: torch.dtype) -> tuple[np.dtype[np.generic], ...]:
    """Return the numpy dtypes that can store ``dtype``, in this machine's byte order."""
    try:
        return (torch.empty(0, dtype=dtype).numpy().dtype,)
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}"), np.dtype(f"i{dtype.itemsize}")
