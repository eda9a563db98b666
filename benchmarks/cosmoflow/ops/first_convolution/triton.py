# mypy: allow-untyped-defs
"""Triton kernels of the first convolution with bias, LeakyReLU and a 2x2x2 max-pool, and of its weight gradient.

A program owns ``BLOCK_V`` windows. For each of the eight voxels of a window, a row of the matrix product holds the 27
neighbours with their channels, and further columns that meet zeros. The input has a border of zeros, so the kernels
need no masks for neighbours outside of the volume.

At 8 volumes of 128^3 voxels, 4 to 32 channels, 16 bit: 116 GFLOP in each direction; 0.14 GB read and 0.20 GB written
in the forward pass, 0.34 GB read in the backward pass. The border costs a copy of the input before: 0.4 GB more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.cosmoflow.ops.conv_leaky_pool import check_edges
from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for, require_contiguous

_FORMAT = torch.channels_last_3d


@triton.jit
def _rows(window, V, D, H, W, INPUTS: tl.constexpr):
    """Return the offsets, int64, of the first neighbours of the windows' first voxels; D H W are the result's edges."""
    line = tl.minimum(window, V - 1).to(tl.int64) // W
    plane = line // H
    depth = plane // D * (2 * D + 2) + plane % D * 2
    return ((depth * (2 * H + 2) + line % H * 2) * (2 * W + 2) + window % W * 2) * INPUTS


@triton.jit
def _neighbours(H, W, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the offsets of the columns from a voxel's first neighbour; those of columns behind the last are 0."""
    k = tl.arange(0, BLOCK_K)
    tap = k // INPUTS
    offset = ((tap // 9 * (2 * H + 2) + tap // 3 % 3) * (2 * W + 2) + tap % 3) * INPUTS + k % INPUTS
    return tl.where(tap < 27, offset, 0)


@triton.jit
def first_convolution_forward_kernel(
    x_ptr,  # (N, 2D + 2, 2H + 2, 2W + 2, INPUTS), with a border of zeros
    weight_ptr,  # (C, 27 INPUTS)
    bias_ptr,  # (C,)
    y_ptr,  # (V, C), in the order N D H W
    code_ptr,  # (V, C) int8
    slope,
    V, D, H, W, C,
    INPUTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the result and the codes of the program's windows. Grid (ceil(V / BLOCK_V),)."""
    window = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    used = (k < 27 * INPUTS)[:, None] & (column < C)[None, :]
    weight = tl.load(weight_ptr + column[None, :] * (27 * INPUTS) + k[:, None], mask=used, other=0.0)
    source = (x_ptr + _rows(window, V, D, H, W, INPUTS))[:, None] + _neighbours(H, W, INPUTS, BLOCK_K)[None, :]
    largest = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    code = tl.zeros((BLOCK_V, BLOCK_C), tl.int32)
    for corner in tl.range(0, 8, num_stages=STAGES):
        behind = ((corner // 4 * (2 * H + 2) + corner // 2 % 2) * (2 * W + 2) + corner % 2) * INPUTS
        z = tl.dot(tl.load(source + behind), weight, input_precision="ieee")
        larger = (z > largest) | (z != z) | (corner == 0)
        largest = tl.where(larger, z, largest)
        code = tl.where(larger, corner, code)
    y = largest + tl.load(bias_ptr + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    target = window.to(tl.int64)[:, None] * C + column[None, :]
    mask = (window < V)[:, None] & (column < C)[None, :]
    tl.store(y_ptr + target, tl.where(y > 0, y, y * slope).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(code_ptr + target, tl.where(y > 0, code, code + 8).to(tl.int8), mask=mask)


@triton.jit
def first_convolution_gradient_kernel(
    dy_ptr,  # (V, C)
    code_ptr,  # (V, C) int8
    x_ptr,  # as in the forward pass
    weight_ptr,  # (programs, 27 INPUTS, C) fp32, written: sums over the program's windows
    bias_ptr,  # (programs, C) fp32, written
    slope,
    V, D, H, W, C,
    INPUTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the program's sums of the gradients of weight and bias. Grid (programs,)."""
    k, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    neighbour = _neighbours(H, W, INPUTS, BLOCK_K)
    weight = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    bias = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0), num_stages=STAGES):
        window = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = (window < V)[:, None] & (column < C)[None, :]
        target = window.to(tl.int64)[:, None] * C + column[None, :]
        d = tl.load(dy_ptr + target, mask=mask, other=0.0).to(tl.float32)
        code = tl.load(code_ptr + target, mask=mask, other=0).to(tl.int32)
        d = tl.where(code < 8, d, d * slope)
        bias += d
        d = d.to(x_ptr.dtype.element_ty)
        source = (x_ptr + _rows(window, V, D, H, W, INPUTS))[:, None] + neighbour[None, :]
        for corner in tl.static_range(8):
            behind = ((corner // 4 * (2 * H + 2) + corner // 2 % 2) * (2 * W + 2) + corner % 2) * INPUTS
            dz = tl.where(code % 8 == corner, d, 0.0)
            weight = tl.dot(tl.trans(tl.load(source + behind)), dz, weight, input_precision="ieee")
    inside = (k < 27 * INPUTS)[:, None] & (column < C)[None, :]
    program = tl.program_id(0)
    tl.store(weight_ptr + (program * (27 * INPUTS) + k)[:, None] * C + column[None, :], weight, mask=inside)
    tl.store(bias_ptr + program * C + column, tl.sum(bias, 0), mask=column < C)


TILES: dict[str, Tile] = {
    "forward": Tile(rows=128, warps=4, stages=2),
    "backward": Tile(rows=128, warps=4, programs=2, stages=1),
}


def _arguments(tile: Tile, inputs: int, filters: int) -> dict[str, int]:
    return {
        "INPUTS": inputs,
        "BLOCK_V": tile.rows,
        "BLOCK_K": max(triton.next_power_of_2(27 * inputs), 16),
        "BLOCK_C": max(triton.next_power_of_2(filters), 16),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def forward(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return result and codes, both channels_last_3d, and the input with its border.

    See :class:`benchmarks.cosmoflow.ops.first_convolution.FirstConvolutionPasses`.
    """
    check_edges(x_NCDHW)
    require_contiguous(bias=bias_C)
    source = pad(x_NCDHW, (1,) * 6).contiguous(memory_format=_FORMAT)
    samples, inputs, *edges = x_NCDHW.shape
    depth, height, width = (edge // 2 for edge in edges)
    filters, windows = len(weight), samples * depth * height * width
    shape = (samples, filters, depth, height, width)
    y = torch.empty(shape, dtype=x_NCDHW.dtype, device=x_NCDHW.device, memory_format=_FORMAT)
    code = torch.empty_like(y, dtype=torch.int8)
    rows = weight.to(x_NCDHW.dtype).contiguous(memory_format=_FORMAT)
    tile = TILES["forward"]
    first_convolution_forward_kernel[(triton.cdiv(windows, tile.rows),)](
        source, rows, bias_C, y, code, slope, windows, depth, height, width, filters,
        **_arguments(tile, inputs, filters),
    )  # fmt: skip
    return y, code, source


def backward(dy: Tensor, code: Tensor, source: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias. No atomics: the same bits every time.

    See :class:`benchmarks.cosmoflow.ops.first_convolution.FirstConvolutionPasses`.
    """
    dy, code = dy.contiguous(memory_format=_FORMAT), code.contiguous(memory_format=_FORMAT)
    (samples, filters, depth, height, width), inputs = dy.shape, source.shape[1]
    windows, tile = samples * depth * height * width, TILES["backward"]
    programs = programs_for(triton.cdiv(windows, tile.rows), tile.programs, dy.device, 1)
    weight = dy.new_empty((programs, 27 * inputs * filters), dtype=torch.float32)
    bias = dy.new_empty((programs, filters), dtype=torch.float32)
    first_convolution_gradient_kernel[(programs,)](
        dy, code, source, weight, bias, slope, windows, depth, height, width, filters,
        **_arguments(tile, inputs, filters),
    )  # fmt: skip
    d_weight = column_sums(weight, source.dtype).view(3, 3, 3, inputs, filters).permute(4, 3, 0, 1, 2)
    return d_weight, column_sums(bias, torch.float32)
