"""Dot interaction with the Triton kernels of :mod:`benchmarks.dlrm.ops.dot_interaction.kernels`.

All work is queued on the current stream, without synchronization.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.dlrm.ops.dot_interaction import kernels
from benchmarks.dlrm.ops.dot_interaction.reference import Passes, apply
from common.ops.tile import Tile
from common.ops.triton_support import require_contiguous

_LEAST = 16
"""Smallest side of a matrix product on tensor cores; smaller sides are padded with zeros."""


TILES: dict[str, Tile] = {"forward": Tile(samples=4, warps=2, stages=2), "backward": Tile(samples=4, warps=2, stages=2)}
"""Tile of each pass. ``samples``: samples per program, computed one after another."""


def _launch(tile: Tile, x_BFW: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the kernel constants of a pass."""
    samples, vectors, width = x_BFW.shape
    return (triton.cdiv(samples, tile.samples),), {
        "F": vectors,
        "W": width,
        "BLOCK_F": max(_LEAST, triton.next_power_of_2(vectors)),
        "BLOCK_W": max(_LEAST, triton.next_power_of_2(width)),
        "SAMPLES": tile.samples,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def forward(x_BFW: Tensor, columns: int) -> Tensor:
    """Compute the forward pass in one launch."""
    require_contiguous(x=x_BFW)
    samples, vectors, width = x_BFW.shape
    spare = columns - width - vectors * (vectors - 1) // 2
    y_BY = x_BFW.new_empty((samples, columns))
    grid, constants = _launch(TILES["forward"], x_BFW)
    if samples:
        kernels.dot_interaction_forward_kernel[grid](
            x_BFW, y_BY, samples, columns, BLOCK_Y=triton.next_power_of_2(max(spare, 1)), **constants
        )
    return y_BY


def backward(dy_BY: Tensor, x_BFW: Tensor) -> Tensor:
    """Compute the backward pass in one launch."""
    dy_BY = dy_BY.contiguous()
    dx_BFW = torch.empty_like(x_BFW)
    grid, constants = _launch(TILES["backward"], x_BFW)
    if len(x_BFW):
        kernels.dot_interaction_backward_kernel[grid](
            dy_BY, x_BFW, dx_BFW, len(x_BFW), dy_BY.shape[1], **constants
        )  # fmt: skip
    return dx_BFW


PASSES = Passes(forward, backward)


def dot_interaction(x_BFW: Tensor, columns: int) -> Tensor:
    """See :func:`benchmarks.dlrm.ops.dot_interaction.reference.dot_interaction_reference`."""
    return apply(PASSES, x_BFW, columns)
