"""How the passes of our kernels cut N samples of V voxels and C channels, and tensors as rows of channels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

_MOST_PROGRAMS = 512


def block_of_columns(channels: int, most: int) -> int:
    """Columns of a program: the largest power of two up to ``most`` that wastes none, unless that is below 16."""
    whole = channels & -channels
    return min(whole if whole >= 16 else triton.next_power_of_2(channels), most)


class Cut(NamedTuple):
    """A launch of one pass: grid, and the arguments that every pass takes after its own."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]


def cut(tile: Tile, samples: int, voxels: int, channels: int, device: torch.device, reverse: bool) -> Cut:
    """Cut (samples, voxels, channels) into tiles for one pass.

    Args:
        tile: from the ``TILES`` of the operation.
        samples, voxels, channels: the tensor.
        device: where it runs.
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
    """The tensor as (M, C) rows over all voxels, dense within a row; a copy only where its memory allows no other way.

    A part of the channels of a wider channels_last_3d tensor is such rows already, farther apart.
    """
    rows_MC = x_NCDHW.movedim(1, -1).reshape(-1, x_NCDHW.shape[1])
    return rows_MC if rows_MC.stride(1) == 1 else rows_MC.contiguous()
