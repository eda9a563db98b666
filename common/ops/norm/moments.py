# mypy: allow-untyped-defs
"""Moments of channels over the voxels of a sample, in parts: the first pass of instance norm and group norm.

N samples of V voxels and C channels are in memory as (N, V, C). Each program computes the mean of its voxels and the
sum of squares about this mean. The results of the programs are merged as in Chan, Golub, LeVeque 1979, updating
formulae for variances. A program's sums are relative to the mean of its first voxels, so fp32 is precise enough for
the variance of two million voxels with any mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.ops.tiling import load_tile, own_columns, tile_at


@triton.jit
def voxels_of(program, programs, tiles, V, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr):
    """Return the number of voxels that each program processes. All tiles are full except the last one of the volume."""
    own = (tiles - program + programs - 1) // programs
    last = 0 if REVERSE else (tiles - 1) % programs
    return own * BLOCK_V - (program == last).to(tl.int32) * (tiles * BLOCK_V - V)


@triton.jit
def moments_kernel(
    x_ptr,  # (N, V, C)
    partial_ptr,  # (2, N, programs, C) fp32: mean of the program's voxels, sum of squares about it
    V, C,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, HEAD: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the moments of each channel over this program's voxels. Grid (programs, ceil(columns / BLOCK_C), N)."""
    program, programs, sample = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    column, inside = own_columns(1, C, BLOCK_C)
    tiles = tl.cdiv(V, BLOCK_V)
    first = (tiles - 1 - program if REVERSE else program) * BLOCK_V
    head = tl.arange(0, HEAD)
    near_ptr = x_ptr + (sample.to(tl.int64) * V + first) * C
    near_mask = (first + head < V)[:, None] & inside[None, :]
    near = tl.load(near_ptr + head[:, None] * C + column[None, :], mask=near_mask, other=0.0).to(tl.float32)
    pivot = tl.sum(near, 0) / tl.minimum(V - first, HEAD)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    square = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for index in tl.range(program, tiles, programs, num_stages=STAGES):
        base, offset, mask = tile_at(index, tiles, column, inside, V, C, BLOCK_V, EVEN, REVERSE)
        shifted = load_tile(x_ptr + base, offset, mask, EVEN) - pivot[None, :]
        if not EVEN:
            shifted = tl.where(mask, shifted, 0.0)
        total += shifted
        square += shifted * shifted
    voxels = voxels_of(program, programs, tiles, V, BLOCK_V, REVERSE)
    shift = tl.sum(total, 0) / voxels
    position = (sample * programs + program) * C + column
    tl.store(partial_ptr + position, pivot + shift, mask=inside)
    about_mean = tl.maximum(tl.sum(square, 0) - shift * shift * voxels, 0.0)
    tl.store(partial_ptr + tl.num_programs(2) * programs * C + position, about_mean, mask=inside)
