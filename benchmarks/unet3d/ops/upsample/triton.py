# mypy: allow-untyped-defs
"""Triton kernels of a 2x2x2 transposed convolution with stride 2, concatenated with a skip connection.

All memory is channels last. The input has M = N D H W rows of C_in channels, the output 8 M rows of 2 C: the
convolution's channels, then those of the skip connection. A column of the product is one filter at one of eight taps;
the weight is (C_in, 8, C) in memory.

Backward copies the first C of the 2 C columns of the gradient, because a convolution needs them dense, and sums them
over the rows at the same time. The other C columns are a view. A program sums in registers over all its tiles, and
reduces over rows only at its end.

At 7 volumes of 64^3 voxels, 64 -> 32 channels, 16 bit: forward 3.05 GB, 0.72 ms at 4.3 TB/s on an H200.

The gradient of the skip connection is a view of the concatenated gradient, which it keeps alive. Activations and
weights in other formats are copied to channels_last_3d first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.unet3d.ops.upsample import check_shapes
from common.ops.tile import Tile
from common.ops.tiling import cut, load_tile, own_columns, store_tile, tile_at
from common.ops.triton_support import require_contiguous


@triton.jit
def upsample_kernel(
    x_ptr,  # (M, C_in)
    weight_ptr,  # (C_in, 8 C)
    bias_ptr,  # (C,)
    skip_ptr,  # (8 M, C), in the order N 2D 2H 2W
    joined_ptr,  # (8 M, 2 C), likewise
    M, H, W, C_IN,
    C: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a tile of the transposed convolution, and copy the same tile of the skip connection beside it.

    Grid (ceil(M / BLOCK_M) * ceil(8 C / BLOCK_N),), columns first.
    """
    blocks = tl.cdiv(8 * C, BLOCK_N)
    voxel = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    exists, inside = voxel < M, column < 8 * C
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, C_IN, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)
        there = channel < C_IN
        mask = exists[:, None] & there[None, :]
        x = tl.load(x_ptr + voxel[:, None] * C_IN + channel[None, :], mask=mask, other=0.0)
        mask = there[:, None] & inside[None, :]
        weight = tl.load(weight_ptr + channel[:, None] * (8 * C) + column[None, :], mask=mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    tap, filter_ = column // C, column % C
    total += tl.load(bias_ptr + filter_, mask=inside, other=0.0).to(tl.float32)[None, :]
    # Output row of a voxel's first corner, and offset in rows of each tap.
    line = voxel // W
    row = (line // H * (4 * H) + line % H * 2) * (2 * W) + voxel % W * 2
    behind = (tap // 4 * (2 * H) + tap // 2 % 2) * (2 * W) + tap % 2
    mask = exists[:, None] & inside[None, :]
    target = joined_ptr + row[:, None] * (2 * C) + (behind * (2 * C) + filter_)[None, :]
    skip = tl.load(skip_ptr + row[:, None] * C + (behind * C + filter_)[None, :], mask=mask, other=0.0)
    tl.store(target, total.to(joined_ptr.dtype.element_ty), mask=mask)
    tl.store(target + C, skip, mask=mask)


@triton.jit
def upsample_backward_kernel(
    d_joined_ptr,  # (M, 2 C)
    d_up_ptr,  # (M, C)
    partial_ptr,  # (programs, C) fp32: sums of d_up over the program's rows
    M, C,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Copy the first C columns of every row to ``d_up``, and write their sums over a program's rows to ``partial``.

    Grid (programs, ceil(C / BLOCK_C), 1).
    """
    column, inside = own_columns(1, C, BLOCK_C)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    tiles = tl.cdiv(M, BLOCK_V)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, M, C, BLOCK_V, EVEN, REVERSE)
        source, within, _ = tile_at(index, tiles, column, inside, M, 2 * C, BLOCK_V, EVEN, REVERSE)
        d_up = load_tile(d_joined_ptr + source, within, mask, EVEN)
        store_tile(d_up_ptr + base, offset, d_up, mask, EVEN)
        total += d_up
    tl.store(partial_ptr + tl.program_id(0) * C + column, tl.sum(total, 0), mask=inside)


FORWARD_TILES: dict[str, Tile] = {"forward": Tile(rows=64, columns=128, channels=64, warps=4)}
BACKWARD_TILES: dict[str, Tile] = {"backward": Tile(columns=128, elements=4096, warps=4, programs=4, stages=3)}
"""Tile by pass. In ``forward``: ``rows`` are voxels, ``columns`` filters at taps, ``channels`` input channels per
iteration.
"""

_SMALLEST_TILE = 16  # smallest dimension of a product
_FORMAT = torch.channels_last_3d


def forward(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
    """Return ``cat(transposed convolution of x, skip)``, (N, 2C, 2D, 2H, 2W), of channels_last_3d inputs."""
    require_contiguous(bias=bias_C)
    samples, channels_in, _, height, width = x_NCDHW.shape
    channels = weight.shape[1]
    rows, columns = x_NCDHW.numel() // channels_in, 8 * channels
    tile = FORWARD_TILES["forward"]
    block_n = max(min(tile.columns, triton.next_power_of_2(columns)), _SMALLEST_TILE)
    shape = (samples, 2 * channels, *skip_NCDHW.shape[2:])
    joined = torch.empty(shape, dtype=x_NCDHW.dtype, device=x_NCDHW.device, memory_format=_FORMAT)
    upsample_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, block_n),)](
        x_NCDHW, weight, bias_C, skip_NCDHW, joined, rows, height, width, channels_in, C=channels,
        PRECISION="ieee" if x_NCDHW.dtype == torch.float32 else "tf32",  # ignored for 16-bit inputs
        BLOCK_M=tile.rows, BLOCK_N=block_n,
        BLOCK_K=max(min(tile.channels, triton.next_power_of_2(channels_in)), _SMALLEST_TILE), num_warps=tile.warps,
    )  # fmt: skip
    return joined


def take_apart(d_joined: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a copy of the first half of the channels of a channels_last_3d (N, 2C, D, H, W), and its sums in dtype."""
    channels = d_joined.shape[1] // 2
    d_up_NCDHW = torch.empty_like(d_joined[:, :channels], memory_format=_FORMAT)
    rows = d_up_NCDHW.numel() // channels
    pass_ = cut(BACKWARD_TILES["backward"], 1, rows, channels, d_joined.device, reverse=False)
    partial = d_joined.new_empty((pass_.grid[0], channels), dtype=torch.float32)
    upsample_backward_kernel[pass_.grid](d_joined, d_up_NCDHW, partial, rows, channels, **pass_.arguments)
    return d_up_NCDHW, partial.sum(0).to(dtype)


class _Upsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
        x_NCDHW, weight, skip_NCDHW = (t.contiguous(memory_format=_FORMAT) for t in (x_NCDHW, weight, skip_NCDHW))
        ctx.save_for_backward(x_NCDHW, weight)
        ctx.bias_dtype = bias_C.dtype
        return forward(x_NCDHW, weight, bias_C, skip_NCDHW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCDHW, weight = ctx.saved_tensors
        d_joined = gradients[0].contiguous(memory_format=_FORMAT)
        d_up_NCDHW, d_bias_C = take_apart(d_joined, ctx.bias_dtype)
        needs = [*ctx.needs_input_grad[:2], False]
        dx_NCDHW, dweight, _ = torch.ops.aten.convolution_backward(
            d_up_NCDHW, x_NCDHW, weight, None, [2] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1, needs
        )
        return dx_NCDHW, dweight, d_bias_C, d_joined[:, weight.shape[1] :]


def upsample(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, skip_NCDHW: Tensor) -> Tensor:
    """Return ``cat(transposed convolution of x, skip)``, (N, 2C, 2D, 2H, 2W).

    See :func:`benchmarks.unet3d.ops.upsample.upsample_reference`. The result is channels_last_3d.
    """
    check_shapes(x_NCDHW, weight, skip_NCDHW)
    joined: Tensor = _Upsample.apply(x_NCDHW, weight, bias_C, skip_NCDHW)
    return joined
