"""The cross network through the Triton kernels of :mod:`benchmarks.dlrm_dcnv2.ops.cross_network.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Legend: that of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.dlrm_dcnv2.ops.cross_network import kernels
from benchmarks.dlrm_dcnv2.ops.cross_network.plain import Passes, apply, cross_torch
from common.ops.tiling import tiles
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import require_contiguous

_LEAST = 16
"""Of each side of a product in matrix units; what is smaller is filled up."""


class ProductTile(NamedTuple):
    """How the product is cut.

    Attributes:
        rows, columns: of the result.
        depth: of what is added at once.
        warps: of a program.
        stages: of the pipeline that loads factors.
        group: blocks of rows that go through all columns together.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int


PRODUCT_TILES: dict[str, ProductTile] = {"half": ProductTile(128, 128, 64, 8, 3, 8)}
"""Tile of the product of 16-bit factors. ``bench --sweep`` times others."""

WIDE_TILE = ProductTile(64, 64, 32, 4, 2, 8)
"""The same for fp32 factors, which take twice the memory and no matrix unit."""

TILES: dict[str, tiles.Tile] = {"gradient": tiles.Tile(128, 4096, 4, 6, 1)}
"""Pass to its tile. ``bench --sweep`` times others."""


def cross(
    u_BR: Tensor, w_XR: Tensor, b_X: Tensor, x0_BX: Tensor, x_BX: Tensor, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """The product with the cross in its epilogue. One launch."""
    require_contiguous(u=u_BR, w=w_XR, b=b_X, x0=x0_BX, x=x_BX)
    (samples, rank), inputs = u_BR.shape, len(w_XR)
    y_BX = torch.empty_like(x_BX)
    h_BX = torch.empty_like(x_BX) if keep else None
    tile = WIDE_TILE if u_BR.dtype == torch.float32 else PRODUCT_TILES["half"]
    depth = max(_LEAST, min(tile.depth, triton.next_power_of_2(rank)))
    grid = (triton.cdiv(samples, tile.rows) * triton.cdiv(inputs, tile.columns),)
    if samples:
        kernels.cross_product_kernel[grid](
            u_BR, w_XR, b_X, x0_BX, x_BX, h_BX, y_BX, samples, inputs, rank,
            KEEP=keep, EVEN=samples % tile.rows == 0 and inputs % tile.columns == 0, EVEN_R=rank % depth == 0,
            BLOCK_B=tile.rows, BLOCK_X=tile.columns, BLOCK_R=depth, GROUP=tile.group,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return h_BX, y_BX


def gradient(
    dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor | None, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, of x0, over the one that is given, and of b. Two launches."""
    dy_BX = dy_BX.contiguous()
    require_contiguous(x0=x0_BX, h=h_BX, dx0=dx0_BX)
    samples, inputs = dy_BX.shape
    dh_BX = torch.empty_like(dy_BX)
    added, dx0_BX = dx0_BX is not None, torch.empty_like(dy_BX) if dx0_BX is None else dx0_BX
    grid, arguments = tiles.cut(TILES["gradient"], 1, samples, inputs, dy_BX.device, reverse=False)
    partial_PX = dy_BX.new_empty((grid[0], inputs), dtype=torch.float32)
    kernels.cross_gradient_kernel[grid](
        dy_BX, x0_BX, h_BX, dh_BX, dx0_BX, partial_PX, samples, inputs, ADDED=added, FIRST=first, **arguments
    )
    return dh_BX, dx0_BX, column_sums(partial_PX, torch.float32)


TRITON, FUSED = Passes(cross, gradient), Passes(cross_torch, gradient)


def cross_network(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """See :func:`benchmarks.dlrm_dcnv2.ops.cross_network.plain.cross_network_torch`. All by our kernels."""
    return apply(TRITON, x0_BX, v, w, b)


def cross_network_fused(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The same with PyTorch's product and cross in the forward pass."""
    return apply(FUSED, x0_BX, v, w, b)
