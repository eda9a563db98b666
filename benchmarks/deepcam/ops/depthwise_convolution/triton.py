# mypy: allow-untyped-defs
"""Triton kernels of the depthwise 3x3 convolution and of its gradients; all memory is channels last.

A program owns ``BLOCK_C`` channels and walks over tiles of BLOCK_H x BLOCK_W pixels. It reads each tap of a tile
separately; the caches serve all but the first of the nine reads. The backward kernel multiplies each tap of the
gradient by the weight, for the gradient of the input, and by the input, for that of the weight.

At 8 samples of 728 channels and 48 x 72 pixels, 16 bit: forward 80 MB, backward 121 MB.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.tile import Tile
from common.ops.tiling import column_sums
from common.ops.triton_support import programs_for

TAPS: tl.constexpr = tl.constexpr(9)


@triton.jit
def _pixels(tile, H, W, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return sample, rows and columns of a tile's pixels; rows and columns can lie outside the image."""
    across, down = tl.cdiv(W, BLOCK_W), tl.cdiv(H, BLOCK_H)
    pixel, line = tl.arange(0, BLOCK_H * BLOCK_W), tile // across
    row = line % down * BLOCK_H + pixel // BLOCK_W
    return (line // down).to(tl.int64), row, tile % across * BLOCK_W + pixel % BLOCK_W


@triton.jit
def _load(pointer, sample, row, column, channel, some, H, W, C: tl.constexpr):
    """Return pixels of a sample (pixels, channels), fp32; zeros outside the image and where ``some`` is false."""
    inside = some & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    offset = (sample * H * W + row * W + column)[:, None] * C + channel[None, :]
    return tl.load(pointer + offset, mask=inside[:, None] & (channel < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def depthwise_forward_kernel(
    x_ptr,  # (N, H, W, C)
    weight_ptr,  # (C, 9)
    y_ptr,  # (N, H_OUT, W_OUT, C), written
    N, H, W, H_OUT, W_OUT,
    C: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a tile of the result. Grid (tiles, ceil(C / BLOCK_C))."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    sample, row, column = _pixels(tl.program_id(0), H_OUT, W_OUT, BLOCK_H, BLOCK_W)
    total = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=channel < C, other=0.0).to(tl.float32)
        tap_row, tap_column = row * STRIDE + (tap // 3 - 1) * DILATION, column * STRIDE + (tap % 3 - 1) * DILATION
        total += weight[None, :] * _load(x_ptr, sample, tap_row, tap_column, channel, row < H_OUT, H, W, C)
    inside = (row < H_OUT) & (column < W_OUT)
    offset = (sample * H_OUT * W_OUT + row * W_OUT + column)[:, None] * C + channel[None, :]
    tl.store(y_ptr + offset, total.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (channel < C)[None, :])


@triton.jit
def _tap(
    tap: tl.constexpr, dx, d_weight, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT,
    C: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """Add the products of one tap of the gradient to the gradients of input and weight."""
    weight = tl.load(weight_ptr + channel * TAPS + tap, mask=channel < C, other=0.0).to(tl.float32)
    row, column = row - (tap // 3 - 1) * DILATION, column - (tap % 3 - 1) * DILATION
    some = (row % STRIDE == 0) & (column % STRIDE == 0)
    # rows and columns above and left of the image must stay negative
    row, column = tl.where(row < 0, -1, row // STRIDE), tl.where(column < 0, -1, column // STRIDE)
    dy = _load(dy_ptr, sample, row, column, channel, some, H_OUT, W_OUT, C)
    return dx + weight[None, :] * dy, d_weight + x * dy


@triton.jit
def depthwise_backward_kernel(
    dy_ptr,  # (N, H_OUT, W_OUT, C)
    x_ptr,  # (N, H, W, C)
    weight_ptr,  # (C, 9)
    dx_ptr,  # (N, H, W, C), written
    partial_ptr,  # (programs, 9, C) fp32, written: the program's sums for the gradient of the weight
    N, H, W, H_OUT, W_OUT,
    C: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input in the program's tiles, and its sums. Grid (programs, ceil(C / BLOCK_C))."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    zeros = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), tl.float32)
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    tiles = N * tl.cdiv(H, BLOCK_H) * tl.cdiv(W, BLOCK_W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        sample, row, column = _pixels(tile, H, W, BLOCK_H, BLOCK_W)
        inside = (row < H) & (column < W)
        x = _load(x_ptr, sample, row, column, channel, inside, H, W, C)
        dx = zeros
        # fmt: off
        dx, w0 = _tap(0, dx, w0, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w1 = _tap(1, dx, w1, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w2 = _tap(2, dx, w2, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w3 = _tap(3, dx, w3, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w4 = _tap(4, dx, w4, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w5 = _tap(5, dx, w5, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w6 = _tap(6, dx, w6, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w7 = _tap(7, dx, w7, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        dx, w8 = _tap(8, dx, w8, x, dy_ptr, weight_ptr, sample, row, column, channel, H_OUT, W_OUT, C, STRIDE, DILATION)
        # fmt: on
        offset = (sample * H * W + row * W + column)[:, None] * C + channel[None, :]
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside[:, None] & (channel < C)[None, :])
    target = partial_ptr + tl.program_id(0) * (TAPS * C) + channel
    tl.store(target, tl.sum(w0, 0), mask=channel < C)
    tl.store(target + C, tl.sum(w1, 0), mask=channel < C)
    tl.store(target + 2 * C, tl.sum(w2, 0), mask=channel < C)
    tl.store(target + 3 * C, tl.sum(w3, 0), mask=channel < C)
    tl.store(target + 4 * C, tl.sum(w4, 0), mask=channel < C)
    tl.store(target + 5 * C, tl.sum(w5, 0), mask=channel < C)
    tl.store(target + 6 * C, tl.sum(w6, 0), mask=channel < C)
    tl.store(target + 7 * C, tl.sum(w7, 0), mask=channel < C)
    tl.store(target + 8 * C, tl.sum(w8, 0), mask=channel < C)


TILES: dict[str, Tile] = {
    "forward": Tile(rows=8, width=8, columns=64, warps=8, programs=0),
    "backward": Tile(rows=4, width=8, columns=64, warps=8, programs=2),
}
"""Tiles of ``rows`` x ``width`` pixels and ``columns`` channels."""

_FORMAT = torch.channels_last


def _launch(tile: Tile, pixels: tuple[int, int, int], channels: int, x: Tensor) -> tuple[tuple[int, int], dict]:
    """Return grid and tile of a launch over N samples of H x W ``pixels``."""
    samples, height, width = pixels
    blocks = triton.cdiv(channels, tile.columns)
    tiles = samples * triton.cdiv(height, tile.rows) * triton.cdiv(width, tile.width)
    arguments = {"BLOCK_H": tile.rows, "BLOCK_W": tile.width, "BLOCK_C": tile.columns, "num_warps": tile.warps}
    return (programs_for(tiles, tile.programs, x.device, blocks), blocks), arguments


class _DepthwiseConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor, weight: Tensor, stride: int, dilation: int) -> Tensor:
        x_NCHW = x_NCHW.contiguous(memory_format=_FORMAT)
        samples, channels, height, width = x_NCHW.shape
        size = (triton.cdiv(height, stride), triton.cdiv(width, stride))
        shape = (samples, channels, *size)
        y = torch.empty(shape, dtype=x_NCHW.dtype, device=x_NCHW.device, memory_format=_FORMAT)
        grid, tile = _launch(TILES["forward"], (samples, *size), channels, x_NCHW)
        depthwise_forward_kernel[grid](
            x_NCHW, weight.contiguous(), y, samples, height, width, *size, C=channels, STRIDE=stride,
            DILATION=dilation, **tile,
        )  # fmt: skip
        ctx.save_for_backward(x_NCHW, weight)
        ctx.steps = stride, dilation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, weight = ctx.saved_tensors
        stride, dilation = ctx.steps
        dy = gradients[0].contiguous(memory_format=_FORMAT)
        samples, channels, height, width = x_NCHW.shape
        dx = torch.empty_like(x_NCHW, memory_format=_FORMAT)
        grid, tile = _launch(TILES["backward"], (samples, height, width), channels, x_NCHW)
        partial = dy.new_empty((grid[0], 9 * channels), dtype=torch.float32)
        depthwise_backward_kernel[grid](
            dy, x_NCHW, weight.contiguous(), dx, partial, samples, height, width, *dy.shape[2:], C=channels,
            STRIDE=stride, DILATION=dilation, **tile,
        )  # fmt: skip
        d_weight = column_sums(partial, weight.dtype).view(9, channels).t().reshape(weight.shape)
        return dx, d_weight, None, None


def depthwise_convolution(x_NCHW: Tensor, weight: Tensor, stride: int, dilation: int) -> Tensor:
    """Return the convolution, channels_last. No atomics: the same bits every time.

    See :func:`benchmarks.deepcam.ops.depthwise_convolution.depthwise_convolution_reference`.
    """
    result: Tensor = _DepthwiseConvolution.apply(x_NCHW, weight, stride, dilation)
    return result
