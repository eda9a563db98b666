"""Launches and autograd function of the kernels of :mod:`benchmarks.maskrcnn.ops.roi_align.kernels`. Shapes as there.

Forward has one launch per set of regions; backward has one per set and one for all. Sums use no atomics, and gradients
are bit-identical in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from benchmarks.maskrcnn.ops.roi_align import kernels
from benchmarks.maskrcnn.ops.roi_align.reference import Regions, check, least_areas
from common.ops.tile import Tile

_SETS = 2
"""Maximum number of region sets in a pass."""
_MOST_REGIONS = 1 << 15
"""Maximum number of regions per picture, whose indices are 16-bit."""
_LEAST = 16
"""Minimum size of each side in a matrix product."""


TILES: dict[str, Tile] = {
    "forward": Tile(channels=256, warps=4),
    "lists": Tile(regions=256, warps=2),
    "backward": Tile(side=8, channels=128, bins=32, warps=4),
}
"""Name of the pass to its tile.

- ``channels``: channels per program;
- ``regions``: regions that a program handles together;
- ``side``: cells along a side of a tile, at least 4;
- ``bins``: bins of a region that a program handles at a time.
"""


def _sizes(levels: Sequence[Tensor]) -> list[int]:
    return [size for level in levels for size in level.shape[2:]]


class _RoiAlign(Function):
    @staticmethod
    def forward(
        ctx: Any, regions: Sequence[Regions], strides: Sequence[int], samples: int, *levels: Tensor
    ) -> tuple[Tensor, ...]:
        levels = tuple(level.contiguous(memory_format=torch.channels_last) for level in levels)
        regions = [
            own._replace(boxes_BR4=own.boxes_BR4.contiguous(), there_BR=own.there_BR.contiguous()) for own in regions
        ]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(tensor for own in regions for tensor in own[:2]))
        ctx.resolutions, ctx.samples = [own.resolution for own in regions], samples
        ctx.shapes, ctx.dtype = [level.shape for level in levels], levels[0].dtype
        ctx.scales, ctx.areas = [1 / stride for stride in strides], least_areas(strides)
        tile = TILES["forward"]
        results = []
        channels = levels[0].shape[1]
        for boxes_BR4, there_BR, bins in regions:
            count = there_BR.numel()
            out_NSSC = levels[0].new_empty((count, bins, bins, channels))
            block = min(tile.channels, triton.next_power_of_2(channels))
            if out_NSSC.numel():
                kernels.roi_align_forward_kernel[(count * bins, triton.cdiv(channels, block))](
                    *levels, boxes_BR4, there_BR, out_NSSC, *_sizes(levels), *ctx.scales, *ctx.areas,
                    there_BR.shape[1], channels, S=bins, K=samples, BLOCK_S=triton.next_power_of_2(bins),
                    BLOCK_C=block, num_warps=tile.warps,
                )  # fmt: skip
            results.append(out_NSSC.permute(0, 3, 1, 2))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tile = TILES["backward"]
        pictures, channels = ctx.shapes[0][:2]
        device = ctx.saved_tensors[0].device
        d_levels = [
            torch.empty(shape, dtype=ctx.dtype, device=device, memory_format=torch.channels_last)
            for shape in ctx.shapes
        ]
        across = [triton.cdiv(shape[3], tile.side) for shape in ctx.shapes]
        tiles = [triton.cdiv(shape[2], tile.side) * count for shape, count in zip(ctx.shapes, across, strict=True)]
        starts = [sum(tiles[index + 1 :]) for index in range(len(tiles) - 1)]
        sizes, tile_grid = _sizes(d_levels), (*starts, *across)
        sets, cuts = [], []
        for gradient, boxes_BR4, there_BR, bins in zip(
            gradients, ctx.saved_tensors[::2], ctx.saved_tensors[1::2], ctx.resolutions, strict=True
        ):
            if gradient is None or not there_BR.numel():
                continue
            lists = _lists(boxes_BR4, there_BR, sum(tiles), (*sizes, *ctx.scales, *ctx.areas, *tile_grid), bins, ctx)
            sets.append((gradient.contiguous(memory_format=torch.channels_last), boxes_BR4, *lists))
            width = triton.next_power_of_2(bins)
            cuts.append((bins, width, max(max(tile.bins, _LEAST) // width, 1)))
        if not sets:
            return None, None, None, *(d_level.zero_() for d_level in d_levels)
        other, other_cut = sets[-1], cuts[-1]
        block = min(tile.channels, max(triton.next_power_of_2(channels), _LEAST))
        kernels.roi_align_backward_kernel[(pictures * sum(tiles), triton.cdiv(channels, block))](
            *d_levels, *sets[0], *other, *sizes, *ctx.scales, *tile_grid,
            sets[0][1].shape[1], other[1].shape[1], pictures, sum(tiles), channels,
            *cuts[0], *other_cut, SETS=len(sets), K=ctx.samples, TILE=tile.side, BLOCK_C=block, num_warps=tile.warps,
        )  # fmt: skip
        return None, None, None, *d_levels


def _lists(
    boxes_BR4: Tensor, there_BR: Tensor, tiles: int, geometry: tuple[float, ...], bins: int, ctx: Any
) -> tuple[Tensor, Tensor]:
    """Return number and list of the regions that touch each tile of each picture: (B, T) int32, (B, T, R) int16."""
    pictures, regions = there_BR.shape
    count_BT = torch.empty((pictures, tiles), dtype=torch.int32, device=there_BR.device)
    list_BTR = torch.empty((pictures, tiles, regions), dtype=torch.int16, device=there_BR.device)
    tile = TILES["lists"]
    kernels.roi_align_lists_kernel[(tiles, pictures)](
        boxes_BR4, there_BR, count_BT, list_BTR, *geometry, regions, tiles,
        S=bins, K=ctx.samples, TILE=TILES["backward"].side,
        BLOCK=min(tile.regions, triton.next_power_of_2(regions)), num_warps=tile.warps,
    )  # fmt: skip
    return count_BT, list_BTR


def roi_align(
    levels: Sequence[Tensor], regions: Sequence[Regions], strides: Sequence[int], samples: int
) -> tuple[Tensor, ...]:
    """Return for each set the features (B R, C, S, S) of its regions.

    See :func:`benchmarks.maskrcnn.ops.roi_align.reference.roi_align_reference`.

    Raises:
        ValueError: the shapes don't fit, or there are more than 32,768 regions per picture or more than two sets.
    """
    check(levels, regions, strides, most=_SETS)
    for own in regions:
        if own.there_BR.shape[1] > _MOST_REGIONS:
            raise ValueError(f"{own.there_BR.shape[1]} regions of a picture: at most {_MOST_REGIONS}")
    results: tuple[Tensor, ...] = _RoiAlign.apply(regions, strides, samples, *levels)
    return results
