"""The cross network through the Triton kernels of :mod:`benchmarks.dlrm_dcnv2.ops.cross_network.kernels`.

Everything is enqueued on the current stream and nothing waits for the device. Legend: that of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.dlrm_dcnv2.ops.cross_network import kernels
from benchmarks.dlrm_dcnv2.ops.cross_network.reference import Passes, apply, cross_reference
from common.ops.tile import Tile
from common.ops.tiling import tiles
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import require_contiguous

_LEAST = 16
"""Of each side of a product in matrix units; what is smaller is filled up."""


PRODUCT_TILES: dict[str, Tile] = {
    "forward": Tile(rows=64, columns=256, depth=32, warps=8, stages=4, group=8),
    "backward": Tile(rows=64, columns=256, depth=32, warps=4, stages=4, group=8),
}
"""Direction to the tile of its product of 16-bit factors.

``group``: blocks of rows that go through all columns together.
"""

WIDE_TILE = Tile(rows=64, columns=64, depth=32, warps=4, stages=2, group=8)
"""The same for fp32 factors, which take twice the memory and no matrix unit."""

TILES: dict[str, Tile] = {"gradient": Tile(columns=128, elements=4096, warps=4, programs=6, stages=1)}
"""Pass to its tile."""


def _launch(tile: Tile, samples: int, inputs: int, rank: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a product."""
    depth = max(_LEAST, min(tile.depth, triton.next_power_of_2(rank)))
    return (triton.cdiv(samples, tile.rows) * triton.cdiv(inputs, tile.columns),), {
        "EVEN": samples % tile.rows == 0 and inputs % tile.columns == 0,
        "EVEN_R": rank % depth == 0,
        "BLOCK_B": tile.rows,
        "BLOCK_X": tile.columns,
        "BLOCK_R": depth,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _tile(key: str, dtype: torch.dtype) -> Tile:
    return WIDE_TILE if dtype == torch.float32 else PRODUCT_TILES[key]


def cross(
    u_BR: Tensor, w_XR: Tensor, b_X: Tensor, x0_BX: Tensor, x_BX: Tensor, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """The product with the cross in its epilogue. One launch."""
    require_contiguous(u=u_BR, w=w_XR, b=b_X, x0=x0_BX, x=x_BX)
    (samples, rank), inputs = u_BR.shape, len(w_XR)
    y_BX = torch.empty_like(x_BX)
    h_BX = torch.empty_like(x_BX) if keep else None
    grid, constants = _launch(_tile("forward", u_BR.dtype), samples, inputs, rank)
    if samples:
        kernels.cross_product_kernel[grid](
            u_BR, w_XR, b_X, x0_BX, x_BX, h_BX, y_BX, samples, inputs, rank, KEEP=keep, **constants
        )
    return h_BX, y_BX


def gradient(dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, of x0 and of b. Two launches."""
    dx0_BX = torch.empty_like(x0_BX)
    dh_BX, db_X = _gradient_into(dx0_BX, dy_BX, x0_BX, h_BX, added=False, first=first)
    return dh_BX, dx0_BX, db_X


def _gradient_into(
    dx0_BX: Tensor, dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, added: bool, first: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of h and of b; that of x0 over, or, if ``added``, onto the one that is given."""
    dy_BX = dy_BX.contiguous()
    require_contiguous(x0=x0_BX, h=h_BX, dx0=dx0_BX)
    samples, inputs = dy_BX.shape
    dh_BX = torch.empty_like(dy_BX)
    grid, arguments = tiles.cut(TILES["gradient"], 1, samples, inputs, dy_BX.device, reverse=False)
    partial_PX = dy_BX.new_empty((grid[0], inputs), dtype=torch.float32)
    kernels.cross_gradient_kernel[grid](
        dy_BX, x0_BX, h_BX, dh_BX, dx0_BX, partial_PX, samples, inputs, ADDED=added, FIRST=first, **arguments
    )
    return dh_BX, column_sums(partial_PX, torch.float32)


def between(
    du_BR: Tensor, v_RX: Tensor, dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor, first: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The product with the next layer's pass in its epilogue. Two launches."""
    dy_BX = dy_BX.contiguous()
    require_contiguous(du=du_BR, v=v_RX, x0=x0_BX, h=h_BX, dx0=dx0_BX)
    (samples, rank), inputs = du_BR.shape, v_RX.shape[1]
    dh_BX = torch.empty_like(dy_BX)
    dx_BX = None if first else torch.empty_like(dy_BX)
    tile = _tile("backward", du_BR.dtype)
    grid, constants = _launch(tile, samples, inputs, rank)
    partial_PX = dy_BX.new_empty((triton.cdiv(samples, tile.rows), inputs), dtype=torch.float32)
    if samples:
        kernels.cross_between_kernel[grid](
            du_BR, v_RX, dy_BX, x0_BX, h_BX, dx_BX, dh_BX, dx0_BX, partial_PX, samples, inputs, rank,
            FIRST=first, **constants,
        )  # fmt: skip
    return dx_BX, dh_BX, dx0_BX, column_sums(partial_PX, torch.float32)


def add_then_gradient(
    du_BR: Tensor, v_RX: Tensor, dy_BX: Tensor, x0_BX: Tensor, h_BX: Tensor, dx0_BX: Tensor, first: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """PyTorch's product onto the gradient, then the next layer's pass. Three launches."""
    dx_BX = torch.addmm(dy_BX, du_BR, v_RX)
    dh_BX, db_X = _gradient_into(dx0_BX, dx_BX, x0_BX, h_BX, added=True, first=first)
    return dx_BX, dh_BX, dx0_BX, db_X


TRITON, FUSED = Passes(cross, gradient, between), Passes(cross_reference, gradient, add_then_gradient)


def cross_network(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """See :func:`benchmarks.dlrm_dcnv2.ops.cross_network.reference.cross_network_reference`.

    Our kernels compute the epilogues.
    """
    return apply(TRITON, x0_BX, v, w, b)


def cross_network_fused(x0_BX: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The same with all products from PyTorch."""
    return apply(FUSED, x0_BX, v, w, b)
