"""Input planes of the network as bits, and the eight symmetries of the board.

The 13 planes "mlperf07" are, in order: own and opponent stones of the 4 newest positions (own stones are those of the
player to move), all ones if black is to move, chains with exactly 1, exactly 2 and at least 3 liberties, and moves that
capture. The search and the records have them as bits: ``numpy.packbits`` of the planes in the order plane, row,
column.

Shapes: B positions, K bytes of a position, P points of the board (row, then column), A moves: all points, then pass.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PLANES = 13

PADDED_PLANES = 16
"""Planes of the network's input. The last three are zero: tensor cores read multiples of 8 half-precision channels."""

SYMMETRIES = 8


def feature_bytes(board: int) -> int:
    """Return K, the number of bytes of the packed planes of one position on a board of ``board`` lines."""
    return -(-PLANES * board**2 // 8)


def symmetry_tables(board: int) -> NDArray[np.int64]:
    """Return for every symmetry the point that each point's value comes from: (8, P), ``y[p] = x[table[s, p]]``.

    Symmetries 0 to 3 are rotations (``numpy.rot90``) by 0, 90, 180 and 270 degrees. Symmetries 4 to 7 first mirror the
    columns, and then rotate in the same way.
    """
    points = np.arange(board**2).reshape(board, board)
    rotated = [np.rot90(start, turns) for start in (points, points[:, ::-1]) for turns in range(4)]
    return np.stack([table.reshape(-1) for table in rotated])


class FeatureBits:
    """Unpacks bits to planes and applies symmetries, on a device and without synchronisation."""

    def __init__(self, board: int, device: torch.device | str) -> None:
        self._board, self._points = board, board**2
        self._shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
        # The pass move is not on the board, so that every symmetry keeps it.
        tables = np.pad(symmetry_tables(board), ((0, 0), (0, 1)), constant_values=self._points)
        self._tables_8A = torch.from_numpy(tables).to(device)

    def planes(self, bits_BK: Tensor, dtype: torch.dtype, symmetry_B: Tensor | None = None) -> Tensor:
        """Return the planes (B, PADDED_PLANES, rows, columns) of 0 and 1, channels_last.

        Args:
            bits_BK: uint8.
            symmetry_B: integers 0 to 7, the symmetry to apply to each position; None for no symmetry.
        """
        count, board = len(bits_BK), self._board
        flat = (bits_BK[:, :, None] >> self._shifts & 1).flatten(1)[:, : PLANES * self._points]
        planes_BCP = flat.unflatten(1, (PLANES, self._points))
        if symmetry_B is not None:
            source_BP = self._tables_8A[symmetry_B.long(), : self._points]
            planes_BCP = planes_BCP.gather(2, source_BP[:, None].expand(-1, PLANES, -1))
        shape = (count, PADDED_PLANES, board, board)
        padded = torch.zeros(shape, dtype=dtype, device=bits_BK.device).contiguous(memory_format=torch.channels_last)
        padded[:, :PLANES] = planes_BCP.unflatten(2, (board, board))
        return padded

    def apply(self, moves_BA: Tensor, symmetry_B: Tensor) -> Tensor:
        """Return a distribution over moves after the symmetry of each position, (B, A)."""
        return moves_BA.gather(1, self._tables_8A[symmetry_B.long()])
