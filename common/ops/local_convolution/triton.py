"""Convolution of one input channel with the Triton kernels of :mod:`common.ops.local_convolution.kernels`.

All work is enqueued on the current stream, and the host never waits for the device, so a CUDA graph can capture it.
The result is channels_last_3d. Shapes: N samples, C channels, D H W slab.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from common.ops.local_convolution import kernels, reference
from common.ops.local_convolution.reference import LocalConvolution
from common.ops.tile import Tile
from common.ops.triton_support import multiprocessors

TILES: dict[str, Tile] = {
    "forward": Tile(voxels=128, warps=4, programs=8, stages=1),
    "weight": Tile(voxels=64, warps=2, programs=12, stages=2),
}
"""Tile of each pass. ``voxels``: output voxels per tile, at least 32 per warp."""

_MOST_COLUMNS = 64
_FEWEST_COLUMNS = 16
"""Smallest number of columns of a tensor core product."""


class _Launch(NamedTuple):
    """Grid (programs, columns, samples), sizes and constants of a kernel launch."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: dict[str, Any]


def _launch(tile: Tile, x_NCDHW: Tensor, y_shape: torch.Size, stride: int) -> _Launch:
    samples, channels, *volume = y_shape
    voxels = volume[0] * volume[1] * volume[2]
    block_c = min(max(triton.next_power_of_2(channels), _FEWEST_COLUMNS), _MOST_COLUMNS)
    columns, tiles = triton.cdiv(channels, block_c), triton.cdiv(voxels, tile.voxels)
    programs = tiles
    if tile.programs:
        programs = min(tiles, max(1, multiprocessors(x_NCDHW.device) * tile.programs // (columns * samples)))
    constants = {
        "STRIDE": stride,
        "BLOCK_U": tile.voxels,
        "BLOCK_C": block_c,
        "EVEN": voxels % tile.voxels == 0 and channels % block_c == 0,
        "num_warps": tile.warps,
    }
    return _Launch((programs, columns, samples), (*x_NCDHW.shape[2:], *volume[1:], voxels, channels), constants)


def forward(x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the convolution, padded with zeros, of (N, 1, D, H, W) with (C out, 1, 3, 3, 3)."""
    volume = [(size - 1) // stride + 1 for size in x_NCDHW.shape[2:]]
    shape = torch.Size((len(x_NCDHW), len(weight), *volume))
    y_NCDHW = torch.empty(shape, dtype=x_NCDHW.dtype, device=x_NCDHW.device, memory_format=torch.channels_last_3d)
    grid, sizes, constants = _launch(TILES["forward"], x_NCDHW, shape, stride)
    kernels.single_channel_forward_kernel[grid](x_NCDHW.contiguous(), weight.contiguous(), y_NCDHW, *sizes, **constants)
    return y_NCDHW


def weight_gradient(dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the weight gradient. Each program writes a partial sum in fp32; these are added in a fixed order."""
    tile = TILES["weight"]
    (programs, columns, samples), sizes, constants = _launch(tile, x_NCDHW, dy_NCDHW.shape, stride)
    partial = x_NCDHW.new_empty((samples, programs, *weight.shape), dtype=torch.float32)
    kernels.single_channel_weight_kernel[programs, columns, samples](
        dy_NCDHW.contiguous(memory_format=torch.channels_last_3d), x_NCDHW.contiguous(), partial, *sizes,
        STAGES=tile.stages, **constants,
    )  # fmt: skip
    return partial.sum((0, 1)).to(weight.dtype)


def triton_convolution() -> LocalConvolution:
    """Return the implementation, which supports one input channel only."""

    def backward(
        dy_NCDHW: Tensor, x_NCDHW: Tensor, weight: Tensor, stride: int, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        # a single input channel is usually the image, which needs no gradient, so there is no kernel for it
        dx_NCDHW, _ = reference.backward(dy_NCDHW, x_NCDHW, weight, stride, (True, False)) if needs[0] else (None, None)
        return dx_NCDHW, weight_gradient(dy_NCDHW, x_NCDHW, weight, stride) if needs[1] else None

    return LocalConvolution(forward, backward)
