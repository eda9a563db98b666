"""The prepared files of a graph on their way into memory: read past the page cache, copied while the next are read."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor

from common.data.aligned_buffers import AlignedBuffers
from common.data.direct_reader import AHEAD, PIECE_BYTES
from common.data.direct_rows import DirectRows


class RowLoader:
    """Copies rows of one file after another into tensors; a context manager, whose end is that of all copies.

    Args:
        device: of the rank, and the current one: its GPU gets the rows from pinned buffers.
        piece_bytes: that are read at a time.
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
        """Copy rows ``first`` to ``last``, the latter not among them, and say after each piece which have arrived.

        On a GPU they have for what is enqueued from then on.

        Args:
            rows: of the file.
            first, last: of them.
            into: [last - first, *row_shape], of the rows' dtype.

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
