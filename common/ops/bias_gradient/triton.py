"""Launch the kernel of :mod:`common.ops.bias_gradient.kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.bias_gradient import kernels
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.tiling.tiles import cut

TILES: dict[str, Tile] = {"sums": Tile(columns=64, elements=8192, warps=4, programs=2, stages=3)}


def row_sums(d_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """See :func:`common.ops.bias_gradient.reference.row_sums_reference`. No atomics: the same bits every time."""
    d_RC = d_RC.contiguous()
    rows, columns = d_RC.shape
    grid, arguments = cut(TILES["sums"], 1, rows, columns, d_RC.device, reverse=False)
    partial_PC = d_RC.new_empty((grid[0], columns), dtype=torch.float32)
    kernels.row_sums_kernel[grid](d_RC, partial_PC, rows, columns, **arguments)
    return column_sums(partial_PC, dtype)
