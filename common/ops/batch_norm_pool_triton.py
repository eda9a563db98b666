# mypy: allow-untyped-defs
"""``max_pool(relu(BN(x)), 3, stride 2, padding 1)`` in Triton: the end of an image network's stem.

The normalised map is never written. Forward writes the pooled map, the x behind each maximum, and where in the 3x3
window it was (int8, 0 ... 8). Backward takes its sums over the pooled map alone, then every 2x2 patch of dx gathers
from the four windows that reach into it.
Shapes: N images, H x W input, OH x OW output, C channels; all channels_last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from common.ops.batch_norm import Norm
from common.ops.batch_norm_triton import coefficients, gradient_sums, statistics

_PIXELS = 32
_CHANNELS = 64


@triton.jit
def _pool_kernel(
    x_ptr,  # (N, H, W, C)
    statistics_ptr,  # (5, C) fp32
    y_ptr, source_ptr,  # (N, OH, OW, C): pooled map, x behind it
    place_ptr,  # (N, OH, OW, C) int8
    H, W, C, OH, OW,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (N * OH, columns / BLOCK_C, OW / BLOCK_W)."""
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < C
    image, oh = tl.program_id(0) // OH, tl.program_id(0) % OH
    ow = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    scale = tl.load(statistics_ptr + column, mask=inside, other=0.0)[None, :]
    shift = tl.load(statistics_ptr + C + column, mask=inside, other=0.0)[None, :]
    best = tl.full((BLOCK_W, BLOCK_C), float("-inf"), tl.float32)
    source = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    place = tl.zeros((BLOCK_W, BLOCK_C), tl.int32)
    for kh in tl.static_range(3):
        h = oh * 2 - 1 + kh
        row = h + tl.zeros_like(ow)
        base = x_ptr + (image.to(tl.int64) * H + h) * W * C
        for kw in tl.static_range(3):
            w = ow * 2 - 1 + kw
            valid = ((row >= 0) & (row < H) & (w >= 0) & (w < W))[:, None] & inside[None, :]
            x = tl.load(base + w[:, None] * C + column[None, :], mask=valid, other=0.0).to(tl.float32)
            y = x * scale + shift
            better = valid & (y > best)
            best = tl.where(better, y, best)
            source = tl.where(better, x, source)
            place = tl.where(better, kh * 3 + kw, place)
    output = (tl.program_id(0).to(tl.int64) * OW + ow)[:, None] * C + column[None, :]
    mask = (ow < OW)[:, None] & inside[None, :]
    tl.store(y_ptr + output, tl.maximum(best, 0.0).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(source_ptr + output, source.to(source_ptr.dtype.element_ty), mask=mask)
    tl.store(place_ptr + output, place.to(tl.int8), mask=mask)


@triton.jit
def _window(dy_ptr, source_ptr, place_ptr, row, oh, ow, column, inside, scale, shift, OH, OW, C):
    """Masked gradient and place of the maximum of windows ``ow`` of output row ``oh``; place -1 outside the map."""
    valid = ((oh + tl.zeros_like(ow) < OH) & (ow < OW))[:, None] & inside[None, :]
    offset = ((row + oh).to(tl.int64) * OW + ow)[:, None] * C + column[None, :]
    dy = tl.load(dy_ptr + offset, mask=valid, other=0.0).to(tl.float32)
    source = tl.load(source_ptr + offset, mask=valid, other=0.0).to(tl.float32)
    place = tl.load(place_ptr + offset, mask=valid, other=-1).to(tl.int32)
    return tl.where(source * scale + shift > 0.0, dy, 0.0), place


@triton.jit
def _patch_gradient(x_ptr, dx_ptr, dz, a, b, c, image, h, w, column, inside, H, W, C):
    mask = ((h + tl.zeros_like(w) < H) & (w < W))[:, None] & inside[None, :]
    offset = ((image.to(tl.int64) * H + h) * W + w)[:, None] * C + column[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offset, (a * dz + b * x + c).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pool_gradient_kernel(
    dy_ptr, source_ptr, place_ptr,  # (N, OH, OW, C)
    x_ptr,  # (N, H, W, C)
    statistics_ptr, coefficients_ptr,  # (5, C) and (3, C) fp32
    dx_ptr,  # (N, H, W, C)
    H, W, C, OH, OW,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (N * OH, columns / BLOCK_C, OW / BLOCK_W): each program writes the patches at (2 oh, 2 ow)."""
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < C
    image, oh = tl.program_id(0) // OH, tl.program_id(0) % OH
    ow = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    scale = tl.load(statistics_ptr + column, mask=inside, other=0.0)[None, :]
    shift = tl.load(statistics_ptr + C + column, mask=inside, other=0.0)[None, :]
    a = tl.load(coefficients_ptr + column, mask=inside, other=0.0)[None, :]
    b = tl.load(coefficients_ptr + C + column, mask=inside, other=0.0)[None, :]
    c = tl.load(coefficients_ptr + 2 * C + column, mask=inside, other=0.0)[None, :]
    row = image * OH
    d00, p00 = _window(
        dy_ptr, source_ptr, place_ptr, row, oh, ow, column, inside, scale, shift, OH, OW, C
    )  # fmt: skip
    d01, p01 = _window(
        dy_ptr, source_ptr, place_ptr, row, oh, ow + 1, column, inside, scale, shift, OH, OW, C
    )  # fmt: skip
    d10, p10 = _window(
        dy_ptr, source_ptr, place_ptr, row, oh + 1, ow, column, inside, scale, shift, OH, OW, C
    )  # fmt: skip
    d11, p11 = _window(
        dy_ptr, source_ptr, place_ptr, row, oh + 1, ow + 1, column, inside, scale, shift, OH, OW, C
    )  # fmt: skip
    h, w = 2 * oh, 2 * ow
    dz = tl.where(p00 == 4, d00, 0.0)
    _patch_gradient(x_ptr, dx_ptr, dz, a, b, c, image, h, w, column, inside, H, W, C)
    dz = tl.where(p00 == 5, d00, 0.0) + tl.where(p01 == 3, d01, 0.0)
    _patch_gradient(x_ptr, dx_ptr, dz, a, b, c, image, h, w + 1, column, inside, H, W, C)
    dz = tl.where(p00 == 7, d00, 0.0) + tl.where(p10 == 1, d10, 0.0)
    _patch_gradient(x_ptr, dx_ptr, dz, a, b, c, image, h + 1, w, column, inside, H, W, C)
    dz = tl.where(p00 == 8, d00, 0.0) + tl.where(p01 == 6, d01, 0.0)
    dz += tl.where(p10 == 2, d10, 0.0) + tl.where(p11 == 0, d11, 0.0)
    _patch_gradient(x_ptr, dx_ptr, dz, a, b, c, image, h + 1, w + 1, column, inside, H, W, C)


def _cut(channels: int, output_NCHW: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    images, _, oh, ow = output_NCHW.shape
    block_w = min(triton.next_power_of_2(ow), _PIXELS)
    block_c = min(triton.next_power_of_2(channels), _CHANNELS)
    grid = (images * oh, triton.cdiv(channels, block_c), triton.cdiv(ow, block_w))
    return grid, {"BLOCK_W": block_w, "BLOCK_C": block_c, "num_warps": 4}


def pool(x_NCHW: Tensor, statistics_5C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled map, the x behind each maximum (both in the dtype of ``x_NCHW``), and its place in the window (int8)."""
    images, channels, height, width = x_NCHW.shape
    shape = (images, channels, (height + 1) // 2, (width + 1) // 2)
    y_NCHW = torch.empty(shape, dtype=x_NCHW.dtype, device=x_NCHW.device, memory_format=torch.channels_last)
    source_NCHW, place_NCHW = torch.empty_like(y_NCHW), torch.empty_like(y_NCHW, dtype=torch.int8)
    grid, blocks = _cut(channels, y_NCHW)
    _pool_kernel[grid](
        x_NCHW, statistics_5C, y_NCHW, source_NCHW, place_NCHW, height, width, channels, *shape[2:], **blocks
    )
    return y_NCHW, source_NCHW, place_NCHW


def pool_gradient(
    dy_NCHW: Tensor,
    source_NCHW: Tensor,
    place_NCHW: Tensor,
    x_NCHW: Tensor,
    statistics_5C: Tensor,
    coefficients_3C: Tensor,
) -> Tensor:
    """Gradient of ``x_NCHW`` from that of the pooled map."""
    dx_NCHW = torch.empty_like(x_NCHW)
    _, channels, height, width = x_NCHW.shape
    grid, blocks = _cut(channels, dy_NCHW)
    _pool_gradient_kernel[grid](
        dy_NCHW, source_NCHW, place_NCHW, x_NCHW, statistics_5C, coefficients_3C, dx_NCHW, height, width, channels,
        *dy_NCHW.shape[2:], **blocks,
    )  # fmt: skip
    return dx_NCHW


class _BatchNormReLUMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NCHW: Tensor, weight: Tensor, bias: Tensor, norm: Norm, group: dist.ProcessGroup | None
    ) -> Tensor:
        x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        statistics_5C = statistics(x_NCHW, norm, group)
        y_NCHW, source_NCHW, place_NCHW = pool(x_NCHW, statistics_5C)
        ctx.save_for_backward(x_NCHW, statistics_5C, source_NCHW, place_NCHW)
        ctx.group = group
        return y_NCHW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, statistics_5C, source_NCHW, place_NCHW = ctx.saved_tensors
        dy_NCHW = gradients[0].contiguous(memory_format=torch.channels_last)
        partial, _ = gradient_sums(dy_NCHW, None, source_NCHW, statistics_5C, True)
        d_parameters, coefficients_3C = coefficients(partial[0], partial[1], statistics_5C, ctx.group)
        dx_NCHW = pool_gradient(dy_NCHW, source_NCHW, place_NCHW, x_NCHW, statistics_5C, coefficients_3C)
        return dx_NCHW, d_parameters[1], d_parameters[0], None, None


def batch_norm_relu_max_pool(x_NCHW: Tensor, norm: Norm, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """See :func:`common.ops.batch_norm.batch_norm_relu_max_pool_torch`."""
    result: Tensor = _BatchNormReLUMaxPool.apply(x_NCHW, norm.weight, norm.bias, norm, group)
    return result
