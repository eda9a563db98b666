# mypy: allow-untyped-defs
"""Shared functions of Triton kernels over N samples of V voxels and C channels, in memory (N, V, C).

A program owns ``BLOCK_C`` columns of a sample and walks over tiles of ``BLOCK_V`` voxels. The grid is (programs,
columns / BLOCK_C, N), as returned by :func:`common.ops.tiling.tiles.cut`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_columns(axis: tl.constexpr, C, BLOCK_C: tl.constexpr):
    """Return this program's columns, and a mask of those that exist."""
    column = tl.program_id(axis) * BLOCK_C + tl.arange(0, BLOCK_C)
    return column, column < C


@triton.jit
def tile_at(index, tiles, column, inside, V, stride, BLOCK_V: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr):
    """Return the offset of a tile of this program's sample, the offsets of its elements from there, and their mask.

    ``stride``: elements from one voxel to the next: C, or more if the tensor is a part of wider rows.
    """
    if REVERSE:
        index = tiles - 1 - index
    voxel = tl.arange(0, BLOCK_V)
    base = (tl.program_id(2).to(tl.int64) * V + index * BLOCK_V) * stride
    offset = voxel[:, None] * stride + column[None, :]
    if EVEN:
        mask = inside
    else:
        mask = (index * BLOCK_V + voxel < V)[:, None] & inside[None, :]
    return base, offset, mask


@triton.jit
def load_tile(pointer, offset, mask, EVEN: tl.constexpr):
    if EVEN:
        value = tl.load(pointer + offset)
    else:
        value = tl.load(pointer + offset, mask=mask, other=0.0)
    return value.to(tl.float32)


@triton.jit
def store_tile(pointer, offset, value, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer + offset, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_row(pointer, column, inside):
    """Return a row over this program's columns, fp32 (1, BLOCK_C)."""
    return tl.load(pointer + column, mask=inside, other=0.0).to(tl.float32)[None, :]
