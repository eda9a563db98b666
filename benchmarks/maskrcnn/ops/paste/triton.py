# mypy: allow-untyped-defs
"""Triton kernel of the virtual paste, for both passes, with one program per detection.

A program loops over the columns of its box inside the picture, PIXELS at a time, including the pixel below each
column. For each pixel it checks whether it differs from the previous one in the picture's column order. Both values
are computed from the mask with four loads each, which the L1 cache serves. For 500,000 detections of 20,000 px there
are 10^10 pixels per pass, compared with 3 ms for all bytes from memory.

Both passes use the same kernel, so that counted and written runs agree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.maskrcnn.ops.paste import Masks
from common.ops.tile import Tile


@triton.jit
def _between(position, scale, SIZE: tl.constexpr):
    """Return the first and second row or column of the mask with its border, and the weight of the second."""
    real = tl.maximum(scale * (position.to(tl.float32) + 0.5) - 0.5, 0.0)
    first = tl.minimum(real.to(tl.int32), SIZE + 1)
    return first, tl.minimum(first + 1, SIZE + 1), real - first.to(tl.float32)


@triton.jit
def _load(mask_ptr, row, column, needed, SIZE: tl.constexpr):
    """Load probabilities, which are zero on the border."""
    inner = needed & (row >= 1) & (row <= SIZE) & (column >= 1) & (column <= SIZE)
    return tl.load(mask_ptr + (row - 1) * SIZE + (column - 1), mask=inner, other=0.0).to(tl.float32)


@triton.jit
def _inside(mask_ptr, x, y, needed, scale_x, scale_y, threshold, SIZE: tl.constexpr):
    """Return whether pixels of the box belong to the object; False for pixels that are not ``needed``."""
    left, right, rest_x = _between(x, scale_x, SIZE)
    top, bottom, rest_y = _between(y, scale_y, SIZE)
    share_x = 1.0 - rest_x
    upper = share_x * _load(mask_ptr, top, left, needed, SIZE) + rest_x * _load(mask_ptr, top, right, needed, SIZE)
    lower = share_x * _load(mask_ptr, bottom, left, needed, SIZE) + rest_x * _load(
        mask_ptr, bottom, right, needed, SIZE
    )
    return needed & ((1.0 - rest_y) * upper + rest_y * lower > threshold)


@triton.jit
def paste_kernel(
    probability_ptr,  # (D, SIZE, SIZE)
    boxes_ptr,  # (D, 4) fp32
    size_ptr,  # (D, 2) int32
    there_ptr,  # (D,) bool
    first_ptr,  # (D,) int64, WRITES only
    out_ptr,  # (D,) int32 counts, or (T,) int32 ends
    growth, threshold,
    SIZE: tl.constexpr, WRITES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Write the number of run ends of a detection's pasted mask, or if WRITES the ends, in column order.

    The last end is that of the picture. ``growth`` is (SIZE + 2) / SIZE. Grid (D,).
    """
    detection = tl.program_id(0).to(tl.int64)
    mask_ptr = probability_ptr + detection * SIZE * SIZE
    height = tl.load(size_ptr + 2 * detection)
    width = tl.load(size_ptr + 2 * detection + 1)
    there = tl.load(there_ptr + detection) != 0
    u1 = tl.load(boxes_ptr + 4 * detection, mask=there, other=0.0)
    v1 = tl.load(boxes_ptr + 4 * detection + 1, mask=there, other=0.0)
    u2 = tl.load(boxes_ptr + 4 * detection + 2, mask=there, other=0.0)
    v2 = tl.load(boxes_ptr + 4 * detection + 3, mask=there, other=0.0)
    extent_x = (u2 - u1) * 0.5 * growth
    extent_y = (v2 - v1) * 0.5 * growth
    x1 = ((u2 + u1) * 0.5 - extent_x).to(tl.int32)
    y1 = ((v2 + v1) * 0.5 - extent_y).to(tl.int32)
    x2 = ((u2 + u1) * 0.5 + extent_x).to(tl.int32)
    y2 = ((v2 + v1) * 0.5 + extent_y).to(tl.int32)
    scale_x = ((SIZE + 2) / tl.maximum(x2 - x1 + 1, 1).to(tl.float64)).to(tl.float32)
    scale_y = ((SIZE + 2) / tl.maximum(y2 - y1 + 1, 1).to(tl.float64)).to(tl.float32)
    left = tl.maximum(x1, 0)
    right = tl.minimum(x2 + 1, width)
    top = tl.maximum(y1, 0)
    bottom = tl.minimum(y2 + 1, height)
    nonempty = there & (right > left) & (bottom > top)
    column_length = tl.maximum(bottom - top, 0) + 1
    pixels = tl.where(nonempty, (right - left) * column_length, 0)
    # Between full columns there are no zeros: the pixel below a column is the first of the next column.
    full = (top == 0) & (bottom == height)
    wraps_after = tl.where(full, left, right)
    below_from = tl.where(full, right - 1, left)
    below_until = tl.where(bottom < height, right, tl.minimum(right, width - 1))  # nothing is below the last column

    if WRITES:
        out_ptr += tl.load(first_ptr + detection)
    found = tl.zeros((), tl.int32)
    for start in range(0, pixels, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        x = left + pixel // column_length
        y = top + pixel % column_length
        in_box = y < bottom
        exists = (pixel < pixels) & (in_box | ((x >= below_from) & (x < below_until)))
        wraps = (y == top) & (x > wraps_after)
        own = _inside(mask_ptr, x - x1, y - y1, exists & in_box, scale_x, scale_y, threshold, SIZE)
        before = _inside(
            mask_ptr, tl.where(wraps, x - 1, x) - x1, tl.where(wraps, bottom, y) - 1 - y1,
            exists & (wraps | (y > top)), scale_x, scale_y, threshold, SIZE,
        )  # fmt: skip
        ends = (own != before).to(tl.int32)
        if WRITES:
            slot = found + tl.cumsum(ends, 0) - 1
            tl.store(out_ptr + slot, x * height + y, mask=ends > 0)
        found += tl.sum(ends, 0)
    if WRITES:
        tl.store(out_ptr + found, height * width, mask=there)
    else:
        tl.store(out_ptr + detection, tl.where(there, found + 1, 0))


TILES: dict[str, Tile] = {"paste": Tile(pixels=512, warps=4)}
"""``pixels``: pixels of a box that a program handles at a time."""


@torch.no_grad()
def count_runs(masks: Masks, threshold: float) -> Tensor:
    """Return the number of runs of each mask, (D,) int32.

    See :func:`benchmarks.maskrcnn.ops.paste.count_runs_reference`.
    """
    counts_D = torch.empty(len(masks.there_D), dtype=torch.int32, device=masks.there_D.device)
    _launch(masks, threshold, counts_D, counts_D, writes=False)
    return counts_D


@torch.no_grad()
def write_ends(masks: Masks, threshold: float, first_D: Tensor, ends_T: Tensor) -> None:
    """Write the end of each run to ``ends_T``; see :func:`benchmarks.maskrcnn.ops.paste.write_ends_reference`."""
    _launch(masks, threshold, first_D.contiguous(), ends_T, writes=True)


def _launch(masks: Masks, threshold: float, first_D: Tensor, out: Tensor, *, writes: bool) -> None:
    detections, size, _ = masks.probability_DSS.shape
    if not detections:
        return
    tile = TILES["paste"]
    paste_kernel[(detections,)](
        masks.probability_DSS.contiguous(), masks.boxes_D4.contiguous(), masks.size_D2.int().contiguous(),
        masks.there_D.contiguous(), first_D, out, (size + 2) / size, threshold,
        SIZE=size, WRITES=writes, PIXELS=tile.pixels, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
