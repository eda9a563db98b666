# mypy: allow-untyped-defs, disable-error-code="assignment"
# (a tuple grows within a kernel)
"""Whole rows in a few equal parts, and how a pass over whole rows is cut.

Triton's blocks are powers of two: a row of 12,288 in one of them would be a quarter air, in registers and in what is
loaded. In three parts of 4,096 it is none. Parts are a tuple, of which every thread has the same columns of each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from common.ops.norm.row_programs import row_programs
from common.ops.tile import Tile

_MOST_PARTS = 5

_ROW_OF_TILES = 8192
"""Features that the tiles of whole rows are meant for; narrower rows take as many more at a time, up to 8."""

_SHARED_FOR_SUMS = 8 << 10
"""Bytes of shared memory beside the rows in flight, through which warps exchange their sums."""


class Parts(NamedTuple):
    """A row's.

    Attributes:
        number: of parts.
        columns: of each, a power of two.
    """

    number: int
    columns: int


def parts_of(features: int) -> Parts:
    """The parts of a row that leave the least air; of several ways the one with the fewest."""
    choices = [
        Parts(number, triton.next_power_of_2(triton.cdiv(features, number))) for number in range(1, _MOST_PARTS + 1, 2)
    ]
    return min(choices, key=lambda parts: (parts.number * parts.columns, parts.number))


def launch(tile: Tile, read: Sequence[torch.Tensor | None]) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a pass over whole rows.

    Args:
        tile: how it is cut; it has fewer stages where shared memory has no room for the rows in flight.
        read: matrices (T, E) that a program reads whole rows of; the first is one.
    """
    given = [x for x in read if x is not None]
    device, (tokens, features) = given[0].device, given[0].shape
    parts = parts_of(features)
    rows = tile.rows * min(8, max(1, _ROW_OF_TILES // (parts.number * parts.columns)))
    rows = 1 << (rows.bit_length() - 1)
    in_flight = rows * parts.number * parts.columns * sum(x.element_size() for x in given)
    return (row_programs(tokens, rows, tile.programs, device),), {
        "E": features,
        "PARTS": parts.number,
        "ROWS": rows,
        "BLOCK": parts.columns,
        "STAGES": min(tile.stages, 1 + (_shared_memory(device) - _SHARED_FOR_SUMS) // in_flight),
        "num_warps": tile.warps,
    }


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; of a GPU like Hopper where kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@triton.jit
def columns_of(part: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a part."""
    return part * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def place_of_part(row, T, part: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Place of a part of rows, in int64, and which of its elements exist."""
    column = columns_of(part, BLOCK)
    mask = (row < T)[:, None]
    if PARTS * BLOCK != E:
        mask = mask & (column < E)[None, :]
    return row.to(tl.int64)[:, None] * E + column[None, :], mask


@triton.jit
def load_parameter(pointer, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """A parameter of E elements in parts, fp32 (1, BLOCK) each; 0 behind its end."""
    parts = ()
    for part in tl.static_range(PARTS):
        column = columns_of(part, BLOCK)
        parts += (tl.load(pointer + column, mask=column < E, other=0.0).to(tl.float32)[None, :],)
    return parts


@triton.jit
def sum_of_parts(parts, PARTS: tl.constexpr):
    """Sums over whole rows, (rows, 1)."""
    total = parts[0]
    for part in tl.static_range(1, PARTS):
        total += parts[part]
    return tl.sum(total, 1)[:, None]


@triton.jit
def moments_of_parts(parts, epsilon, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Means and 1 / standard deviations of whole rows whose parts are 0 behind their end, (rows, 1) each."""
    mean = sum_of_parts(parts, PARTS) / E
    square = ()
    for part in tl.static_range(PARTS):
        centred = parts[part] - mean
        if PARTS * BLOCK != E:
            centred = tl.where((columns_of(part, BLOCK) < E)[None, :], centred, 0.0)
        square += (centred * centred,)
    return mean, 1.0 / tl.sqrt(sum_of_parts(square, PARTS) / E + epsilon)
