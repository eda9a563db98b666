# mypy: allow-untyped-defs
"""Triton kernels of ``max_pool(relu(BN(x)), 3, stride 2, padding 1)``.

The normalised map is never stored. Forward writes the pooled map, the x of each maximum, and its index in the 3x3
window (0 ... 8, or ``NOWHERE`` where ReLU gives 0). Backward computes its sums from the pooled map alone; then every
2x2 patch of dx gathers the gradients of the four windows that overlap it.
Shapes: N images, H x W input, OH x OW output, C channels; all channels_last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from common.ops.batch_norm.reference import BatchNormState
from common.ops.batch_norm.triton import coefficients, gradient_sums, statistics
from common.ops.tile import Tile

NOWHERE = tl.constexpr(9)


@triton.jit
def _pixels(OH, OW, C, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the pixels of this program in the pooled map (index, image, row, column), and its channels."""
    blocks = tl.cdiv(C, BLOCK_C)
    channel = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    pixel = tl.program_id(0) // blocks * BLOCK + tl.arange(0, BLOCK)
    return pixel, pixel // (OH * OW), pixel // OW % OH, pixel % OW, channel


@triton.jit
def pool_kernel(
    x_ptr,  # (N, H, W, C)
    statistics_ptr,  # (5, C) fp32
    y_ptr, source_ptr,  # (N, OH, OW, C): pooled map, x of each maximum
    index_ptr,  # (N, OH, OW, C) int8: index in the window
    N, H, W, C, OH, OW,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the pooled map. Grid (ceil(N * OH * OW / BLOCK) * ceil(C / BLOCK_C),).

    EVEN: H and W are even, all blocks are full.
    """
    pixel, image, oh, ow, channel = _pixels(OH, OW, C, BLOCK, BLOCK_C)
    inside = (pixel < N * OH * OW)[:, None] & (channel < C)[None, :]
    scale = tl.load(statistics_ptr + channel, mask=channel < C, other=0.0)[None, :]
    shift = tl.load(statistics_ptr + C + channel, mask=channel < C, other=0.0)[None, :]
    centre = ((image.to(tl.int64) * H + 2 * oh) * W + 2 * ow) * C
    best = tl.full((BLOCK, BLOCK_C), float("-inf"), tl.float32)
    source = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    index = tl.zeros((BLOCK, BLOCK_C), tl.int32)
    for kh in tl.static_range(3):
        for kw in tl.static_range(3):
            pointer = x_ptr + (centre + ((kh - 1) * W + kw - 1) * C)[:, None] + channel[None, :]
            if EVEN and kh > 0 and kw > 0:
                x = tl.load(pointer).to(tl.float32)
                y = x * scale + shift
                better = y > best
            else:
                h, w = 2 * oh + kh - 1, 2 * ow + kw - 1
                valid = ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
                if not EVEN:
                    valid = valid & inside
                x = tl.load(pointer, mask=valid, other=0.0).to(tl.float32)
                y = x * scale + shift
                better = valid & (y > best)
            best = tl.where(better, y, best)
            source = tl.where(better, x, source)
            index = tl.where(better, kh * 3 + kw, index)
    output = (pixel.to(tl.int64) * C)[:, None] + channel[None, :]
    index = tl.where(best > 0.0, index, NOWHERE)
    if EVEN:
        tl.store(y_ptr + output, tl.maximum(best, 0.0).to(y_ptr.dtype.element_ty))
        tl.store(source_ptr + output, source.to(source_ptr.dtype.element_ty))
        tl.store(index_ptr + output, index.to(tl.int8))
    else:
        tl.store(y_ptr + output, tl.maximum(best, 0.0).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(source_ptr + output, source.to(source_ptr.dtype.element_ty), mask=inside)
        tl.store(index_ptr + output, index.to(tl.int8), mask=inside)


@triton.jit
def _window(dy_ptr, index_ptr, pixel, valid, channel, C):
    """Return the gradients of some windows and the index of the maximum in each."""
    offset = (pixel.to(tl.int64) * C)[:, None] + channel[None, :]
    dy = tl.load(dy_ptr + offset, mask=valid, other=0.0).to(tl.float32)
    return dy, tl.load(index_ptr + offset, mask=valid, other=NOWHERE).to(tl.int32)


@triton.jit
def _store_patch(x_ptr, dx_ptr, dz, a, b, c, pixel, valid, channel, C, EVEN: tl.constexpr):
    """Write one corner of every 2x2 patch of dx."""
    offset = (pixel * C)[:, None] + channel[None, :]
    if EVEN:
        x = tl.load(x_ptr + offset).to(tl.float32)
        tl.store(dx_ptr + offset, (a * dz + b * x + c).to(dx_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offset, mask=valid, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offset, (a * dz + b * x + c).to(dx_ptr.dtype.element_ty), mask=valid)


@triton.jit
def pool_gradient_kernel(
    dy_ptr, index_ptr,  # (N, OH, OW, C)
    x_ptr,  # (N, H, W, C)
    coefficients_ptr,  # (3, C) fp32
    dx_ptr,  # (N, H, W, C)
    N, H, W, C, OH, OW,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write dx. Grid as in ``pool_kernel``; pixel (oh, ow) handles the 2x2 patch of dx at (2 oh, 2 ow)."""
    pixel, image, oh, ow, channel = _pixels(OH, OW, C, BLOCK, BLOCK_C)
    inside = (pixel < N * OH * OW)[:, None] & (channel < C)[None, :]
    a = tl.load(coefficients_ptr + channel, mask=channel < C, other=0.0)[None, :]
    b = tl.load(coefficients_ptr + C + channel, mask=channel < C, other=0.0)[None, :]
    c = tl.load(coefficients_ptr + 2 * C + channel, mask=channel < C, other=0.0)[None, :]
    below = (oh + 1 < OH)[:, None] & inside
    right = (ow + 1 < OW)[:, None] & inside
    d00, p00 = _window(dy_ptr, index_ptr, pixel, inside, channel, C)
    d01, p01 = _window(dy_ptr, index_ptr, pixel + 1, right, channel, C)
    d10, p10 = _window(dy_ptr, index_ptr, pixel + OW, below, channel, C)
    d11, p11 = _window(dy_ptr, index_ptr, pixel + OW + 1, below & right, channel, C)
    corner = (image.to(tl.int64) * H + 2 * oh) * W + 2 * ow
    lower = (2 * oh + 1 < H)[:, None] & inside
    outer = (2 * ow + 1 < W)[:, None] & inside
    dz = tl.where(p00 == 4, d00, 0.0)
    _store_patch(x_ptr, dx_ptr, dz, a, b, c, corner, inside, channel, C, EVEN)
    dz = tl.where(p00 == 5, d00, 0.0) + tl.where(p01 == 3, d01, 0.0)
    _store_patch(x_ptr, dx_ptr, dz, a, b, c, corner + 1, outer, channel, C, EVEN)
    dz = tl.where(p00 == 7, d00, 0.0) + tl.where(p10 == 1, d10, 0.0)
    _store_patch(x_ptr, dx_ptr, dz, a, b, c, corner + W, lower, channel, C, EVEN)
    dz = tl.where(p00 == 8, d00, 0.0) + tl.where(p01 == 6, d01, 0.0)
    dz += tl.where(p10 == 2, d10, 0.0) + tl.where(p11 == 0, d11, 0.0)
    _store_patch(x_ptr, dx_ptr, dz, a, b, c, corner + W + 1, lower & outer, channel, C, EVEN)


TILES: dict[str, Tile] = {
    "pool": Tile(pixels=16, channels=64, warps=8),
    "pool_gradient": Tile(pixels=16, channels=64, warps=8),
}
"""Tiles by pass, measured at (400, 64, 112, 112) on an H200. ``pixels``: pixels of the pooled map per program."""


def _cut(name: str, x_NCHW: Tensor, height: int, width: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the size arguments of a launch; ``height`` and ``width`` are those of the pooled map."""
    tile = TILES[name]
    images, channels, in_height, in_width = x_NCHW.shape
    block_c = min(triton.next_power_of_2(channels), tile.channels)
    pixels = images * height * width
    even = in_height % 2 == 0 and in_width % 2 == 0 and pixels % tile.pixels == 0 and channels % block_c == 0
    sizes = {"N": images, "H": in_height, "W": in_width, "C": channels, "OH": height, "OW": width}
    blocks = {"BLOCK": tile.pixels, "BLOCK_C": block_c, "EVEN": even, "num_warps": tile.warps}
    return (triton.cdiv(pixels, tile.pixels) * triton.cdiv(channels, block_c),), {**sizes, **blocks}


def pool(x_NCHW: Tensor, statistics_5C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pooled map, the x of each maximum (both dtype of ``x_NCHW``), and its index in the window (int8)."""
    images, channels, height, width = x_NCHW.shape
    shape = (images, channels, (height + 1) // 2, (width + 1) // 2)
    y_NCHW = torch.empty(shape, dtype=x_NCHW.dtype, device=x_NCHW.device, memory_format=torch.channels_last)
    source_NCHW, index_NCHW = torch.empty_like(y_NCHW), torch.empty_like(y_NCHW, dtype=torch.int8)
    grid, arguments = _cut("pool", x_NCHW, *shape[2:])
    pool_kernel[grid](x_NCHW, statistics_5C, y_NCHW, source_NCHW, index_NCHW, **arguments)
    return y_NCHW, source_NCHW, index_NCHW


def pool_gradient(dy_NCHW: Tensor, index_NCHW: Tensor, x_NCHW: Tensor, coefficients_3C: Tensor) -> Tensor:
    """Return the gradient of ``x_NCHW``, in its shape and dtype, given that of the pooled map."""
    dx_NCHW = torch.empty_like(x_NCHW)
    grid, arguments = _cut("pool_gradient", x_NCHW, *dy_NCHW.shape[2:])
    pool_gradient_kernel[grid](dy_NCHW, index_NCHW, x_NCHW, coefficients_3C, dx_NCHW, **arguments)
    return dx_NCHW


class _BatchNormReLUMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NCHW: Tensor, weight: Tensor, bias: Tensor, norm: BatchNormState, group: dist.ProcessGroup | None
    ) -> Tensor:
        x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        statistics_5C = statistics(x_NCHW, norm, group)
        y_NCHW, source_NCHW, index_NCHW = pool(x_NCHW, statistics_5C)
        ctx.save_for_backward(x_NCHW, statistics_5C, source_NCHW, index_NCHW)
        ctx.group = group
        return y_NCHW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, statistics_5C, source_NCHW, index_NCHW = ctx.saved_tensors
        dy_NCHW = gradients[0].contiguous(memory_format=torch.channels_last)
        partial, _ = gradient_sums(dy_NCHW, None, source_NCHW, statistics_5C, True)
        d_parameters, coefficients_3C = coefficients(partial[0], partial[1], statistics_5C, ctx.group)
        dx_NCHW = pool_gradient(dy_NCHW, index_NCHW, x_NCHW, coefficients_3C)
        return dx_NCHW, d_parameters[1], d_parameters[0], None, None


def batch_norm_relu_max_pool(x_NCHW: Tensor, norm: BatchNormState, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return ``max_pool(relu(BN(x)))``, (N, C, (H + 1) // 2, (W + 1) // 2).

    See :func:`common.ops.batch_norm.reference.batch_norm_relu_max_pool_reference`.
    """
    result: Tensor = _BatchNormReLUMaxPool.apply(x_NCHW, norm.weight, norm.bias, norm, group)
    return result
