"""Cross network whose backward pass uses the Triton kernel of this package."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.dlrm_dcnv2.ops.cross_network import kernels
from benchmarks.dlrm_dcnv2.ops.cross_network.reference import apply
from common.ops.tile import Tile
from common.ops.tiling import tiles
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"gradient": Tile(columns=128, elements=4096, warps=4, programs=6, stages=1)}
"""Tile of each pass."""


def gradient(
    dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor | None, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`benchmarks.dlrm_dcnv2.ops.cross_network.reference.gradient_reference`. Takes two launches."""
    dy_BX = dy_BX.contiguous()
    require_contiguous(x0=x0_BX, h=h_BX)
    added = dx0_BX is not None
    if dx0_BX is None:
        dx0_BX = torch.empty_like(x0_BX)
    samples, inputs = dy_BX.shape
    dh_BX = torch.empty_like(dy_BX)
    grid, arguments = tiles.cut(TILES["gradient"], 1, samples, inputs, dy_BX.device, reverse=False)
    partial_PX = dy_BX.new_empty((grid[0], inputs), dtype=torch.float32)
    kernels.cross_gradient_kernel[grid](
        dy_BX, x0_BX, h_BX, dh_BX, dx0_BX, partial_PX, samples, inputs, ADDED=added, FIRST=first, **arguments
    )
    return dh_BX, dx0_BX, column_sums(partial_PX, torch.float32)


def cross_network(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """See :func:`benchmarks.dlrm_dcnv2.ops.cross_network.reference.cross_network_reference`.

    Raises:
        ValueError: ``x0_BX`` is not contiguous.
    """
    require_contiguous(x0=x0_BX)
    return apply(gradient, x0_BX, v, w, b)
