# mypy: allow-untyped-defs
"""Gradient in front of a ReLU, and its sums over the rows for a bias, in one pass.

The pass reads the gradient and the result and writes the masked gradient. Each program keeps its sums in registers
until its end, as in :mod:`common.ops.bias_gelu.triton`. For 32 pictures of 100 x 100 and 256 channels in 16 bits, the
pass moves 492 MB, 115 us at 4.26 TB/s on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.tile import Tile
from common.ops.tiling import column_sums, cut, load_tile, own_columns, store_tile, tile_at


@triton.jit
def relu_gradient_kernel(
    dy_ptr,  # (V, C), rows row_stride elements apart
    y_ptr,  # (V, C), read if MASKED
    dz_ptr,  # (V, C), written if MASKED
    partial_ptr,  # (programs, C) fp32, written if SUMMED
    V, C, row_stride,
    MASKED: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write dy where y is positive (else 0), and its column sums. Grid (programs, ceil(C / BLOCK_C), 1)."""
    column, inside = own_columns(1, C, BLOCK_C)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, row_stride, BLOCK_V, EVEN, REVERSE)
        dz = load_tile(dy_ptr + base, offset, mask, EVEN)
        if MASKED:
            base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
            dz = tl.where(load_tile(y_ptr + base, offset, mask, EVEN) > 0, dz, 0.0)
            store_tile(dz_ptr + base, offset, dz, mask, EVEN)
        if SUMMED:
            total += dz
    if SUMMED:
        tl.store(partial_ptr + tl.program_id(0) * C + column, tl.sum(total, 0), mask=inside)


def relu_gradient(tile: Tile, dy_MC: Tensor, y_MC: Tensor | None, dz_MC: Tensor, summed: bool) -> Tensor | None:
    """Write the gradient in front of a ReLU, and return its sums over the rows.

    Args:
        tile: cut of the pass.
        dy_MC: gradient of the result; each row is contiguous, with any stride between rows.
        y_MC: result, contiguous; None if there is no ReLU.
        dz_MC: output, contiguous; not written if ``y_MC`` is None.
        summed: whether to compute the sums; this takes a second launch.

    Returns:
        Sums over the rows, (C,) fp32; None unless ``summed``.

    Raises:
        ValueError: a tensor has another memory layout.
    """
    rows, columns = dy_MC.shape
    if (
        (columns > 1 and dy_MC.stride(1) != 1)
        or not dz_MC.is_contiguous()
        or not (y_MC is None or y_MC.is_contiguous())
    ):
        raise ValueError("dy must have dense rows, y and dz must be contiguous")
    grid, arguments = cut(tile, 1, rows, columns, dy_MC.device, reverse=False)
    partial_PC = dy_MC.new_empty((grid[0] if summed else 0, columns), dtype=torch.float32)
    relu_gradient_kernel[grid](
        dy_MC, dy_MC if y_MC is None else y_MC, dz_MC, partial_PC, rows, columns, dy_MC.stride(0),
        MASKED=y_MC is not None, SUMMED=summed, **arguments,
    )  # fmt: skip
    return column_sums(partial_PC, torch.float32) if summed else None
