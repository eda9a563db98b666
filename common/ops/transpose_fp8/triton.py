"""Transposes of FP8 matrices with the Triton kernel of :mod:`common.ops.transpose_fp8.kernels`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from common.ops.fp8_cast.reference import E5M2
from common.ops.tile import Tile
from common.ops.transpose_fp8 import kernels
from common.ops.transpose_fp8.reference import room, run_length
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"transpose": Tile(rows=128, columns=128, warps=8)}


def transpose(matrix_NK: Tensor, scratch: Tensor, factors_R: Tensor | None = None) -> Tensor:
    """See :func:`common.ops.transpose_fp8.reference.transpose_reference`. One launch."""
    require_contiguous(matrix=matrix_NK, scratch=scratch, factors=factors_R)
    target_KN = room(matrix_NK, scratch)
    rows, columns = matrix_NK.shape
    tile = TILES["transpose"]
    kernels.transpose_fp8_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        matrix_NK.view(torch.uint8), target_KN.view(torch.uint8), factors_R, rows, columns,
        1 if factors_R is None else run_length(matrix_NK, factors_R), E5M2=matrix_NK.dtype == E5M2,
        BLOCK_N=tile.rows, BLOCK_K=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return target_KN
