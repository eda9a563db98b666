# mypy: allow-untyped-defs
"""Triton kernels of bias, LeakyReLU and a 2x2x2 max-pool, and of their backward pass.

All memory is channels last: M = N D H W rows of C channels for the result, 8 M rows for the convolved volume. A program
walks over tiles of windows. Backward writes all eight voxels of a window, so the gradient needs no zeros before, and
sums the gradient of the bias in registers.

At 8 volumes of 128^3 voxels and 32 channels, 16 bit: forward 1.07 GB read and 0.20 GB written; backward the reverse.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cosmoflow.ops.conv_leaky_pool import check_edges
from common.ops.tile import Tile
from common.ops.tiling import Cut, column_sums, cut, load_row, load_tile, own_columns, store_tile, tile_at
from common.ops.triton_support import require_contiguous


@triton.jit
def _first_rows(index, V, H, W, BLOCK_V: tl.constexpr):
    """Return the row of each window's first voxel in the convolved volume; H and W are edges of the result."""
    window = index * BLOCK_V + tl.arange(0, BLOCK_V)
    line = tl.minimum(window, V - 1).to(tl.int64) // W
    return (line // H * (4 * H) + line % H * 2) * (2 * W) + window % W * 2


@triton.jit
def leaky_pool_forward_kernel(
    z_ptr,  # (8 V, C), in the order N 2D 2H 2W
    bias_ptr,  # (C,)
    y_ptr,  # (V, C), in the order N D H W
    code_ptr,  # (V, C) int8
    slope,
    V, H, W, C,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the result and the codes of the program's windows. Grid (programs, ceil(C / BLOCK_C), 1)."""
    column, inside = own_columns(1, C, BLOCK_C)
    bias = load_row(bias_ptr, column, inside)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        source = z_ptr + _first_rows(index, V, H, W, BLOCK_V)[:, None] * C + column[None, :]
        largest = load_tile(source, 0, mask, EVEN)
        code = tl.zeros((BLOCK_V, BLOCK_C), tl.int32)
        for corner in tl.static_range(1, 8):
            behind = ((corner // 4 * (2 * H) + corner // 2 % 2) * (2 * W) + corner % 2) * C
            z = load_tile(source, behind, mask, EVEN)
            larger = (z > largest) | (z != z)
            largest = tl.where(larger, z, largest)
            code = tl.where(larger, corner, code)
        y = largest + bias
        store_tile(y_ptr + base, offset, tl.where(y > 0, y, y * slope), mask, EVEN)
        store_tile(code_ptr + base, offset, tl.where(y > 0, code, code + 8), mask, EVEN)


@triton.jit
def leaky_pool_backward_kernel(
    dy_ptr,  # (V, C)
    code_ptr,  # (V, C) int8
    dz_ptr,  # (8 V, C), written
    partial_ptr,  # (programs, C) fp32, written: sums of the gradient over the program's windows
    slope,
    V, H, W, C,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the program's windows, and its sums. Grid (programs, ceil(C / BLOCK_C), 1)."""
    column, inside = own_columns(1, C, BLOCK_C)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    tiles = tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        d = load_tile(dy_ptr + base, offset, mask, EVEN)
        code = load_tile(code_ptr + base, offset, mask, EVEN).to(tl.int32)
        d = tl.where(code < 8, d, d * slope)
        total += d
        target = dz_ptr + _first_rows(index, V, H, W, BLOCK_V)[:, None] * C + column[None, :]
        for corner in tl.static_range(8):
            behind = ((corner // 4 * (2 * H) + corner // 2 % 2) * (2 * W) + corner % 2) * C
            store_tile(target, behind, tl.where(code % 8 == corner, d, 0.0), mask, EVEN)
    tl.store(partial_ptr + tl.program_id(0) * C + column, tl.sum(total, 0), mask=inside)


TILES: dict[str, Tile] = {
    "forward": Tile(columns=64, elements=2048, warps=4, programs=4, stages=1),
    "backward": Tile(columns=64, elements=2048, warps=4, programs=4, stages=1),
}

_FORMAT = torch.channels_last_3d


def _cut(pass_: str, result: Tensor) -> tuple[Cut, tuple[int, int, int, int]]:
    """Return the launch for a result (N, C, D, H, W), and its sizes V, H, W, C."""
    samples, channels, depth, height, width = result.shape
    windows = samples * depth * height * width
    launch = cut(TILES[pass_], 1, windows, channels, result.device, reverse=False)
    return launch, (windows, height, width, channels)


def forward(z_NCDHW: Tensor, bias_C: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return ``max_pool(leaky_relu(z + bias))`` and the codes, both channels_last_3d.

    See :func:`benchmarks.cosmoflow.ops.conv_leaky_pool.forward_reference`.
    """
    check_edges(z_NCDHW)
    require_contiguous(bias=bias_C)
    z_NCDHW = z_NCDHW.contiguous(memory_format=_FORMAT)
    samples, channels, *edges = z_NCDHW.shape
    shape = (samples, channels, *(edge // 2 for edge in edges))
    y = torch.empty(shape, dtype=z_NCDHW.dtype, device=z_NCDHW.device, memory_format=_FORMAT)
    code = torch.empty_like(y, dtype=torch.int8)
    launch, sizes = _cut("forward", y)
    leaky_pool_forward_kernel[launch.grid](z_NCDHW, bias_C, y, code, slope, *sizes, **launch.arguments)
    return y, code


def backward(dy: Tensor, code: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of z, channels_last_3d, and its sums (C,), fp32. No atomics: the same bits every time.

    See :func:`benchmarks.cosmoflow.ops.conv_leaky_pool.backward_reference`.
    """
    dy, code = dy.contiguous(memory_format=_FORMAT), code.contiguous(memory_format=_FORMAT)
    samples, channels, *edges = dy.shape
    shape = (samples, channels, *(2 * edge for edge in edges))
    dz_NCDHW = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=_FORMAT)
    launch, sizes = _cut("backward", dy)
    partial_PC = dy.new_empty((launch.grid[0], channels), dtype=torch.float32)
    leaky_pool_backward_kernel[launch.grid](dy, code, dz_NCDHW, partial_PC, slope, *sizes, **launch.arguments)
    return dz_NCDHW, column_sums(partial_PC, torch.float32)
