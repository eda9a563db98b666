"""Loader of prepared files into memory: reads bypass the page cache, and overlap with copies to the device."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from common.data.aligned_buffers import AlignedBuffers
from common.data.direct_reader import AHEAD, PIECE_BYTES
from common.data.direct_rows import DirectRows


class RowLoader:
    """Context manager that copies rows of files into tensors; its exit waits for all copies.

    Args:
        device: device of the rank, which must be current; for a GPU, rows pass through pinned buffers.
        piece_bytes: bytes per read.
    """

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._buffers = AlignedBuffers(2 * AHEAD + 1, piece_bytes, pin_memory=device.type == "cuda")

    def __enter__(self) -> RowLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.close()

    def copy(self, rows: DirectRows, first: int, last: int, into: Tensor) -> Iterator[tuple[int, int]]:
        """Copy rows ``first`` to ``last`` (exclusive), and yield begin and end of each piece that has arrived.

        On a GPU, a piece has arrived only for work that is queued afterwards.

        Args:
            into: output, [last - first, *row_shape], in the rows' dtype.

        Raises:
            DataError: the file has become shorter or cannot be read.
        """
        for piece in rows.read(first, last, self._piece_bytes, buffers=self._buffers):
            begin = piece.first - first
            end = begin + len(piece.values)
            into[begin:end].copy_(piece.values, non_blocking=True)
            if into.is_cuda:
                event = torch.cuda.Event()
                event.record()
                piece.keep_until(event)
            yield begin, end
