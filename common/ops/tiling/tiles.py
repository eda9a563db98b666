"""Cutting of tensors into tiles: N samples of V voxels and C channels, or rows of channels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

_MOST_PROGRAMS = 512


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
    tiles = programs = triton.cdiv(voxels, block_v)
    if tile.programs:
        room = multiprocessors(device) * tile.programs // (column_blocks * samples)
        programs = min(tiles, max(1, room), _MOST_PROGRAMS)
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
