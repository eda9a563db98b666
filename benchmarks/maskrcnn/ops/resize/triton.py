# mypy: allow-untyped-defs
"""Triton kernel that builds a batch from decoded pictures, bit-identical to the reference.

A program writes BLOCK adjacent values (channels of pixels) in each of ROWS rows of a picture. It computes the source
columns once, in float64, for all rows. The cache serves neighbouring reads; each value is written once. Launch with
``enable_fp_fusion=False``, because fused operations would change the weights.

Bytes for 12 pictures of 640 x 480 px, 800 x 1344 and 16 bit: 11 MB in, 77 MB out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

_ONE: tl.constexpr = tl.constexpr(4194304.0)  # 2**22
_HALF: tl.constexpr = tl.constexpr(2097152)
_BITS: tl.constexpr = tl.constexpr(22)


@triton.jit
def _triangle(distance):
    return tl.maximum(1.0 - tl.abs(distance), 0.0)


@triton.jit
def _taps(position, decoded, size):
    """Return two source lines and their weights, in units of 2**-22, for line ``position`` (float64) of ``size``."""
    center = (position + 0.5) * (decoded.to(tl.float64) / size)
    first = tl.maximum(((center - 1.0) + 0.5).to(tl.int32), 0)
    end = tl.minimum(((center + 1.0) + 0.5).to(tl.int32), decoded)
    near = _triangle((first.to(tl.float64) - center) + 0.5)
    far = _triangle(((first + 1).to(tl.float64) - center) + 0.5)
    far = tl.where(first + 1 < end, far, 0.0)
    whole = near + far
    near_weight = (near / whole * _ONE + 0.5).to(tl.int32)
    far_weight = (far / whole * _ONE + 0.5).to(tl.int32)
    return first, tl.minimum(first + 1, decoded - 1), near_weight, far_weight


@triton.jit
def _between(one, near, other, far):
    """Return the interpolated levels, int32."""
    return (one * near + other * far + _HALF) >> _BITS


@triton.jit
def _level(row_ptr, offset, inside):
    return tl.load(row_ptr + offset, mask=inside, other=0).to(tl.int32)


@triton.jit
def resize_kernel(
    pixels_ptr,  # (B, S, S, 3) uint8
    decoded_ptr,  # (B, 2) int32
    size_ptr,  # (B, 2) fp32
    mirrored_ptr,  # (B,) bool
    image_ptr,  # (B, H, W, 3)
    S, H, W,
    blue, green, red,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK adjacent values of ROWS rows of a picture: resized, mirrored, minus the channel's mean; padding is 0.

    Grid (ceil(3 W / BLOCK), ceil(H / ROWS), B).
    """
    picture = tl.program_id(2).to(tl.int64)
    pixels_ptr += picture * S * S * 3
    image_ptr += picture * H * W * 3
    decoded_height = tl.load(decoded_ptr + picture * 2)
    decoded_width = tl.load(decoded_ptr + picture * 2 + 1)
    height = tl.load(size_ptr + picture * 2).to(tl.float64)
    width = tl.load(size_ptr + picture * 2 + 1).to(tl.float64)
    mirrored = tl.load(mirrored_ptr + picture) != 0
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = value % 3
    column = (value // 3).to(tl.float64)
    position = tl.minimum(column, width - 1.0)
    position = tl.where(mirrored, width - 1.0 - position, position)
    left, right, left_weight, right_weight = _taps(position, decoded_width, width)
    left = left * 3 + 2 - channel  # red comes first in the source
    right = right * 3 + 2 - channel
    mean = tl.where(channel == 0, blue, tl.where(channel == 1, green, red))
    for step in range(ROWS):
        row = tl.program_id(1) * ROWS + step
        line = row.to(tl.float64)
        inside = column < tl.where(line < height, width, 0.0)
        upper, lower, upper_weight, lower_weight = _taps(tl.minimum(line, height - 1.0), decoded_height, height)
        upper_ptr = pixels_ptr + upper * S * 3
        lower_ptr = pixels_ptr + lower * S * 3
        above = _between(_level(upper_ptr, left, inside), left_weight, _level(upper_ptr, right, inside), right_weight)
        below = _between(_level(lower_ptr, left, inside), left_weight, _level(lower_ptr, right, inside), right_weight)
        level = _between(above, upper_weight, below, lower_weight).to(tl.float32)
        result = tl.where(inside, level - mean, 0.0)
        tl.store(
            image_ptr + row * W * 3 + value,
            result.to(image_ptr.dtype.element_ty),
            mask=value < tl.where(row < H, W * 3, 0),
        )


TILES: dict[str, Tile] = {"resize": Tile(values=512, rows=8, warps=4)}
"""``values``: channel values of a row that a program writes at a time; ``rows``: rows of a picture per program."""


@torch.no_grad()
def resize(
    pixels_BSS3: Tensor,
    decoded_size_B2: Tensor,
    size_B2: Tensor,
    mirrored_B: Tensor,
    mean: tuple[float, float, float],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Return the resized pictures (B, 3, H, W), channels_last, in ``dtype``.

    See :func:`benchmarks.maskrcnn.ops.resize.resize_reference`. The result is bit-identical.

    Raises:
        ValueError: an input is not contiguous.
    """
    require_contiguous(pixels_BSS3=pixels_BSS3, decoded_size_B2=decoded_size_B2, size_B2=size_B2, mirrored_B=mirrored_B)
    pictures, side = pixels_BSS3.shape[:2]
    height, width = shape
    image_BHW3 = torch.empty((pictures, height, width, 3), dtype=dtype, device=pixels_BSS3.device)
    if image_BHW3.numel():
        tile = TILES["resize"]
        grid = triton.cdiv(3 * width, tile.values), triton.cdiv(height, tile.rows), pictures
        resize_kernel[grid](
            pixels_BSS3, decoded_size_B2, size_B2, mirrored_B, image_BHW3, side, height, width, *mean,
            BLOCK=tile.values, ROWS=tile.rows, num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return image_BHW3.permute(0, 3, 1, 2)
