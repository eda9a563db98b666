# mypy: allow-untyped-defs
"""Triton kernels of RoIAlign on four levels.

Forward: a program handles a row of bins of a region and a block of channels, which are contiguous, and reads the
corners of the row's samples. For 12 pictures, 512 regions of 7 x 7 bins and 128 of 14 x 14 give 154 MB each in 16 bit,
from patches of about 20 x 20 cells, mostly from caches.

Backward: a program handles a tile of cells of a level and a block of channels, and adds the contributions of all
regions that touch the tile, in the order of slots. A preceding kernel lists these regions. Because interpolation is a
product of weights along both axes, a bin contributes its gradient times two numbers to a cell, for any number of
samples. For a tile of P cells this is the product of a (P, bins) matrix of weights and the (bins, C) gradients. Each
gradient of a level is written once, in its own dtype: 0.55 GB for four levels of 12 pictures of 800 x 1344. Atomics
would need a zeroed fp32 buffer of 1.1 GB, which is added to and read again for rounding.

A 16-bit weight is represented by two numbers, of which the second is the rounding error of the first. The matrix units
then give the sums of fp32 weights with an error of 2^-16 for bf16 and 2^-22 for fp16.

Shapes: B pictures, R regions of a picture, C channels, S bins along each side, K samples of a bin along each side, T
tiles of a picture.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _of_level(level, first, second, third, fourth):
    """Return the one of four scalars that belongs to ``level``."""
    return tl.where(level == 0, first, tl.where(level == 1, second, tl.where(level == 2, third, fourth)))


@triton.jit
def _level_of(x1, y1, x2, y2, least_1, least_2, least_3):
    """Return the index of the level of each region."""
    area = (x2 - x1 + 1) * (y2 - y1 + 1)
    return (area >= least_1).to(tl.int32) + (area >= least_2).to(tl.int32) + (area >= least_3).to(tl.int32)


@triton.jit
def _bin_size(first, last, S):
    """Return the bin size along one axis, in cells, of regions with these ends."""
    return tl.maximum(last - first, 1.0) / S


@triton.jit
def _corners(position, size):
    """Return the cells before and after samples on one axis, their weights, and 1 for samples in the level, else 0."""
    inside = (position >= -1.0) & (position <= size)
    position = tl.where(inside, tl.minimum(tl.maximum(position, 0.0), size - 1.0), 0.0)
    before = position.to(tl.int32)
    behind = tl.minimum(before + 1, size - 1)
    share = position - before.to(tl.float32)
    return before, behind, 1.0 - share, share, inside.to(tl.int32)


@triton.jit
def _weight(cell, bin, first, bin_size, size, K: tl.constexpr):
    """Return the weight of a cell in the mean of a bin's samples along one axis."""
    total = tl.zeros((cell + bin).shape, tl.float32)
    for sample in tl.static_range(K):
        position = first + (bin.to(tl.float32) + (sample + 0.5) / K) * bin_size
        inside = (position >= -1.0) & (position <= size)
        position = tl.minimum(tl.maximum(position, 0.0), size - 1.0)
        total += tl.where(inside, tl.maximum(1.0 - tl.abs(position - cell.to(tl.float32)), 0.0), 0.0)
    return total / K


@triton.jit
def roi_align_forward_kernel(
    level_0, level_1, level_2, level_3,  # (B, H, W, C) each
    boxes_ptr,  # (B, R, 4) fp32
    there_ptr,  # (B, R) bool
    out_ptr,  # (B, R, S, S, C)
    height_0, width_0, height_1, width_1, height_2, width_2, height_3, width_3,
    scale_0, scale_1, scale_2, scale_3, least_1, least_2, least_3,
    R, C,
    S: tl.constexpr, K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store one row of bins of a region for BLOCK_C channels: means of K x K samples; 0 for slots without a region.

    Grid (B R S, ceil(C / BLOCK_C)).
    """
    region = tl.program_id(0) // S
    row = tl.program_id(0) % S
    bin = tl.arange(0, BLOCK_S)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = (bin < S)[:, None] & (channel < C)[None, :]
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    if tl.load(there_ptr + region) != 0:
        x1 = tl.load(boxes_ptr + region * 4)
        y1 = tl.load(boxes_ptr + region * 4 + 1)
        x2 = tl.load(boxes_ptr + region * 4 + 2)
        y2 = tl.load(boxes_ptr + region * 4 + 3)
        level = _level_of(x1, y1, x2, y2, least_1, least_2, least_3)
        scale = _of_level(level, scale_0, scale_1, scale_2, scale_3)
        height = _of_level(level, height_0, height_1, height_2, height_3)
        width = _of_level(level, width_0, width_1, width_2, width_3)
        picture = (region // R).to(tl.int64) * height * width * C
        own_level = _of_level(level, level_0, level_1, level_2, level_3) + picture
        first_y = y1 * scale
        first_x = x1 * scale
        bin_height = _bin_size(first_y, y2 * scale, S)
        bin_width = _bin_size(first_x, x2 * scale, S)
        for down in tl.static_range(K):
            y = first_y + (row.to(tl.float32) + (down + 0.5) / K) * bin_height
            above, below, weight_above, weight_below, inside_y = _corners(y, height)
            for across in tl.static_range(K):
                x = first_x + (bin.to(tl.float32) + (across + 0.5) / K) * bin_width
                left, right, weight_left, weight_right, inside_x = _corners(x, width)
                seen = exists & ((inside_x & inside_y)[:, None] != 0)
                left = left[:, None] * C + channel[None, :]
                right = right[:, None] * C + channel[None, :]
                upper = own_level + above * width * C
                lower = own_level + below * width * C
                here = tl.load(upper + left, mask=seen, other=0.0).to(tl.float32) * weight_left[:, None]
                here += tl.load(upper + right, mask=seen, other=0.0).to(tl.float32) * weight_right[:, None]
                total += here * weight_above
                here = tl.load(lower + left, mask=seen, other=0.0).to(tl.float32) * weight_left[:, None]
                here += tl.load(lower + right, mask=seen, other=0.0).to(tl.float32) * weight_right[:, None]
                total += here * weight_below
    out_ptr += tl.program_id(0).to(tl.int64) * S * C
    offset = bin[:, None] * C + channel[None, :]
    tl.store(out_ptr + offset, (total / (K * K)).to(out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _tile(tile, start_0, start_1, start_2, across_0, across_1, across_2, across_3):
    """Return the level of a picture's tile, and the tile's row and column in it. The coarsest level comes first."""
    level = 3 - (tile >= start_2).to(tl.int32) - (tile >= start_1).to(tl.int32) - (tile >= start_0).to(tl.int32)
    own = tile - _of_level(level, start_0, start_1, start_2, 0)
    across = _of_level(level, across_0, across_1, across_2, across_3)
    return level, own // across, own % across


@triton.jit
def _touches(first, bin_size, size, S, tile, K: tl.constexpr, TILE: tl.constexpr):
    """Return whether regions touch, or within rounding might touch, a tile along one axis."""
    begin = first + 0.5 / K * bin_size
    end = first + (S - 0.5 / K) * bin_size
    in_level = (begin <= size) & (end >= -1.0)
    begin = tl.minimum(tl.maximum(begin, 0.0), size - 1.0)
    end = tl.minimum(tl.maximum(end, 0.0), size - 1.0)
    return in_level & (begin < (tile + 1) * TILE) & (end > tile * TILE - 1)


@triton.jit
def roi_align_lists_kernel(
    boxes_ptr,  # (B, R, 4) fp32
    there_ptr,  # (B, R) bool
    count_ptr,  # (B, T) int32
    list_ptr,  # (B, T, R) int16
    height_0, width_0, height_1, width_1, height_2, width_2, height_3, width_3,
    scale_0, scale_1, scale_2, scale_3, least_1, least_2, least_3,
    start_0, start_1, start_2, across_0, across_1, across_2, across_3,
    R, T,
    S: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the number of regions that touch a tile, and their indices, ascending. Grid (T, B)."""
    tile = tl.program_id(0)
    picture = tl.program_id(1).to(tl.int64)
    level, tile_y, tile_x = _tile(tile, start_0, start_1, start_2, across_0, across_1, across_2, across_3)
    scale = _of_level(level, scale_0, scale_1, scale_2, scale_3)
    height = _of_level(level, height_0, height_1, height_2, height_3)
    width = _of_level(level, width_0, width_1, width_2, width_3)
    boxes_ptr += picture * R * 4
    there_ptr += picture * R
    list_ptr += (picture * T + tile) * R
    found = tl.zeros((), tl.int32)
    for start in range(0, R, BLOCK):
        region = start + tl.arange(0, BLOCK)
        there = tl.load(there_ptr + region, mask=region < R, other=0) != 0
        x1 = tl.load(boxes_ptr + region * 4, mask=there, other=0.0)
        y1 = tl.load(boxes_ptr + region * 4 + 1, mask=there, other=0.0)
        x2 = tl.load(boxes_ptr + region * 4 + 2, mask=there, other=0.0)
        y2 = tl.load(boxes_ptr + region * 4 + 3, mask=there, other=0.0)
        hit = there & (_level_of(x1, y1, x2, y2, least_1, least_2, least_3) == level)
        hit &= _touches(y1 * scale, _bin_size(y1 * scale, y2 * scale, S), height, S, tile_y, K, TILE)
        hit &= _touches(x1 * scale, _bin_size(x1 * scale, x2 * scale, S), width, S, tile_x, K, TILE)
        hits = hit.to(tl.int32)
        position = found + tl.cumsum(hits, 0) - 1
        tl.store(list_ptr + position, region.to(tl.int16), mask=hit)
        found += tl.sum(hits, 0)
    tl.store(count_ptr + picture * T + tile, found)


@triton.jit
def _first_and_last(first, bin_size, S, tile, TILE: tl.constexpr):
    """Return the first and last bin along one axis with a sample less than one cell away from the tile."""
    begin = tl.floor((tile * TILE - 1 - first) / bin_size).to(tl.int32)
    end = tl.floor(((tile + 1) * TILE - first) / bin_size).to(tl.int32)
    return tl.maximum(begin, 0), tl.minimum(end, S - 1)


@triton.jit
def _add_regions(
    total, gradient_ptr, boxes_ptr, count_ptr, list_ptr, picture, tile, y, x, tile_y, tile_x, channel, scale,
    height, width, R, T, C,
    S: tl.constexpr, K: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the contributions of one set of regions to the gradient of a tile."""
    boxes_ptr += picture * R * 4
    gradient_ptr += picture * R * (S * S) * C
    list_ptr += (picture * T + tile) * R
    bin = tl.arange(0, ROWS * BLOCK_S)
    column = bin % BLOCK_S
    for index in range(tl.load(count_ptr + picture * T + tile)):
        region = tl.load(list_ptr + index).to(tl.int32)
        first_x = tl.load(boxes_ptr + region * 4) * scale
        first_y = tl.load(boxes_ptr + region * 4 + 1) * scale
        bin_width = _bin_size(first_x, tl.load(boxes_ptr + region * 4 + 2) * scale, S)
        bin_height = _bin_size(first_y, tl.load(boxes_ptr + region * 4 + 3) * scale, S)
        begin_y, end_y = _first_and_last(first_y, bin_height, S, tile_y, TILE)
        begin_x, end_x = _first_and_last(first_x, bin_width, S, tile_x, TILE)
        x_weight = _weight(x[:, None], column[None, :], first_x, bin_width, width, K)
        wanted_x = (column >= begin_x) & (column <= end_x)
        bins = gradient_ptr + region * (S * S) * C
        for begin in range(begin_y, end_y + 1, ROWS):
            row = begin + bin // BLOCK_S
            y_weight = _weight(y[:, None], row[None, :], first_y, bin_height, height, K)
            wanted = (wanted_x & (row <= end_y))[:, None] & (channel < C)[None, :]
            offset = (row * S + column)[:, None] * C + channel[None, :]
            gradient = tl.load(bins + offset, mask=wanted, other=0.0)
            weight = tl.reshape(y_weight[:, None, :] * x_weight[None, :, :], (TILE * TILE, ROWS * BLOCK_S))
            rounded = weight.to(gradient.dtype)
            total = tl.dot(rounded, gradient, total, input_precision="ieee")
            if gradient.dtype != tl.float32:
                rest = (weight - rounded.to(tl.float32)).to(gradient.dtype)
                total = tl.dot(rest, gradient, total, input_precision="ieee")
    return total


@triton.jit
def roi_align_backward_kernel(
    d_level_0, d_level_1, d_level_2, d_level_3,  # (B, H, W, C) each
    gradient_ptr,  # (B, R, S, S, C)
    boxes_ptr,  # (B, R, 4) fp32
    count_ptr,  # (B, T) int32
    list_ptr,  # (B, T, R) int16
    other_gradient_ptr, other_boxes_ptr, other_count_ptr, other_list_ptr,  # second set, or the first again
    height_0, width_0, height_1, width_1, height_2, width_2, height_3, width_3,
    scale_0, scale_1, scale_2, scale_3,
    start_0, start_1, start_2, across_0, across_1, across_2, across_3,
    R, OTHER_R, B, T, C,
    S: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr,
    OTHER_S: tl.constexpr, OTHER_BLOCK_S: tl.constexpr, OTHER_ROWS: tl.constexpr,
    SETS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a TILE x TILE tile of a level for BLOCK_C channels: the sum over the regions in its lists.

    Grid (B T, ceil(C / BLOCK_C)). Tiles of the coarsest level, which have the most regions, come first.
    """
    # The same tile of all pictures is adjacent.
    tile = tl.program_id(0) // B
    picture = (tl.program_id(0) % B).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    level, tile_y, tile_x = _tile(tile, start_0, start_1, start_2, across_0, across_1, across_2, across_3)
    scale = _of_level(level, scale_0, scale_1, scale_2, scale_3)
    height = _of_level(level, height_0, height_1, height_2, height_3)
    width = _of_level(level, width_0, width_1, width_2, width_3)
    y = tile_y * TILE + tl.arange(0, TILE)
    x = tile_x * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE * TILE, BLOCK_C), tl.float32)
    if SETS > 0:
        total = _add_regions(
            total, gradient_ptr, boxes_ptr, count_ptr, list_ptr, picture, tile, y, x, tile_y, tile_x, channel, scale,
            height, width, R, T, C, S, K, BLOCK_S, ROWS, TILE,
        )  # fmt: skip
    if SETS > 1:
        total = _add_regions(
            total, other_gradient_ptr, other_boxes_ptr, other_count_ptr, other_list_ptr, picture, tile, y, x, tile_y,
            tile_x, channel, scale, height, width, OTHER_R, T, C, OTHER_S, K, OTHER_BLOCK_S, OTHER_ROWS, TILE,
        )  # fmt: skip
    d_level = _of_level(level, d_level_0, d_level_1, d_level_2, d_level_3) + picture * height * width * C
    offset = tl.reshape(y[:, None] * width + x[None, :], (TILE * TILE,))
    exists = tl.reshape((y < height)[:, None] & (x < width)[None, :], (TILE * TILE,))
    tl.store(
        d_level + offset[:, None] * C + channel[None, :],
        total.to(d_level.dtype.element_ty),
        mask=exists[:, None] & (channel < C)[None, :],
    )
