# mypy: allow-untyped-defs
"""Tiles of N samples of V voxels and C channels, in memory (N, V, C), and sums of the partial results of programs.

A program owns ``BLOCK_C`` columns of a sample and walks over tiles of ``BLOCK_V`` voxels. The grid is (programs,
columns / BLOCK_C, N), see :func:`cut`. A matrix of rows is one sample whose voxels are the rows.

Every sum over rows has two levels, so that it has the same bits in every run: each program writes the sum of its rows,
and :func:`column_sums` adds these partial sums in a fixed order, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.tile import Tile
from common.ops.triton_support import programs_for

_MOST_PROGRAMS = 512
_COLUMNS = 16
_CHUNK = 256


def block_of_columns(channels: int, most: int) -> int:
    """Return the columns of a program: the largest power of two that divides ``channels``, at most ``most``.

    If that is below 16, return the power of two that holds all channels, at most ``most``.
    """
    whole = channels & -channels
    return min(whole if whole >= 16 else triton.next_power_of_2(channels), most)


class Cut(NamedTuple):
    """Launch of one pass: its grid, and the common arguments of all passes, which follow those of the pass."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]


def cut(tile: Tile, samples: int, voxels: int, channels: int, device: torch.device, reverse: bool) -> Cut:
    """Cut (samples, voxels, channels) into tiles for one pass.

    Args:
        tile: tile of the pass, from the ``TILES`` of the operation.
        reverse: walk from the last tile to the first.
    """
    block_c = block_of_columns(channels, tile.columns)
    block_v = min(max(tile.elements // block_c, 1), triton.next_power_of_2(voxels))
    column_blocks = triton.cdiv(channels, block_c)
    programs = programs_for(triton.cdiv(voxels, block_v), tile.programs, device, column_blocks * samples)
    if tile.programs:
        programs = min(programs, _MOST_PROGRAMS)
    arguments = {
        "BLOCK_V": block_v,
        "BLOCK_C": block_c,
        "EVEN": voxels % block_v == 0 and channels % block_c == 0,
        "STAGES": tile.stages,
        "REVERSE": reverse,
        "num_warps": tile.warps,
    }
    return Cut((programs, column_blocks, samples), arguments)


def channels_last_rows(x_NCDHW: Tensor) -> Tensor:
    """Return the tensor as (M, C) rows over all voxels, each contiguous. Copy only if necessary.

    A range of the channels of a wider channels_last_3d tensor needs no copy: its rows have a larger stride.
    """
    rows_MC = x_NCDHW.movedim(1, -1).reshape(-1, x_NCDHW.shape[1])
    return rows_MC if rows_MC.stride(1) == 1 else rows_MC.contiguous()


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


@triton.jit
def column_sums_kernel(
    partial_ptr,  # (P, C) fp32
    sums_ptr,  # (C,)
    P, C,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the column sums of a matrix of partial sums. Grid (ceil(C / BLOCK_C),)."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < C
    total = tl.zeros((CHUNK, BLOCK_C), tl.float32)
    for first in range(0, P, CHUNK):
        row = first + tl.arange(0, CHUNK)
        offset = row.to(tl.int64)[:, None] * C + column[None, :]
        total += tl.load(partial_ptr + offset, mask=(row < P)[:, None] & inside[None, :], other=0.0)
    tl.store(sums_ptr + column, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=inside)


def column_sums(partial_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows of fp32 partial sums, (C,) in ``dtype``."""
    rows, columns = partial_PC.shape
    sums_C = partial_PC.new_empty(columns, dtype=dtype)
    chunk = min(max(triton.next_power_of_2(rows), 2), _CHUNK)
    column_sums_kernel[(triton.cdiv(columns, _COLUMNS),)](
        partial_PC, sums_C, rows, columns, CHUNK=chunk, BLOCK_C=_COLUMNS, num_warps=4
    )
    return sums_C


def sums_by_dtype(partial_PC: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return :func:`column_sums`, divided into as many equal ranges of columns as there are dtypes, one dtype each.

    One launch writes all of them if the dtypes are equal, as in our models.
    """
    shared = dtypes[0] if len(set(dtypes)) == 1 else torch.float32
    sums = column_sums(partial_PC, shared).view(len(dtypes), -1).unbind()
    return [total.to(dtype) for total, dtype in zip(sums, dtypes, strict=True)]
