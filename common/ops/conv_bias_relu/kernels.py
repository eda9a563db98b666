# mypy: allow-untyped-defs
"""Triton kernel for the epilogue of a convolution whose result is V = N H W rows of C channels.

It works in place where cuDNN has no fused epilogue: it reads and writes the result, and reads the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.tiling.kernels import load_row, load_tile, own_columns, store_tile, tile_at


@triton.jit
def conv_epilogue_kernel(
    y_ptr,  # (V, C), changed in place
    bias_ptr,  # (C,)
    residual_ptr,  # (V, C), read if ADDED
    V, C,
    ADDED: tl.constexpr, RELU: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write y + bias + residual, after ReLU if RELU. Grid (programs, ceil(C / BLOCK_C), 1)."""
    column, inside = own_columns(1, C, BLOCK_C)
    bias = load_row(bias_ptr, column, inside)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        y = load_tile(y_ptr + base, offset, mask, EVEN) + bias
        if ADDED:
            y += load_tile(residual_ptr + base, offset, mask, EVEN)
        if RELU:
            y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        store_tile(y_ptr + base, offset, y, mask, EVEN)
