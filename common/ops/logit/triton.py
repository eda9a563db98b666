"""The logit with the Triton kernels of :mod:`common.ops.logit.kernels`.

All work is enqueued on the current stream, and the host never waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.logit import kernels
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {"forward": Tile(elements=4096, warps=4), "backward": Tile(elements=8192, warps=4)}
"""Tile of each pass."""


def _launch(tile: Tile, samples: int, inputs: int) -> tuple[int, dict[str, Any]]:
    """Return the number of programs and the constants of a pass."""
    columns = triton.next_power_of_2(inputs)
    rows = max(1, tile.elements // columns)
    return triton.cdiv(samples, rows), {"BLOCK_B": rows, "BLOCK_K": columns, "num_warps": tile.warps}


class _Logit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BK: Tensor, weight_1K: Tensor, bias_1: Tensor) -> Tensor:
        require_contiguous(x=x_BK, weight=weight_1K)
        ctx.save_for_backward(x_BK, weight_1K)
        ctx.bias_dtype = bias_1.dtype
        logit_B = x_BK.new_empty(len(x_BK), dtype=torch.float32)
        programs, constants = _launch(TILES["forward"], *x_BK.shape)
        if programs:
            kernels.logit_forward_kernel[(programs,)](x_BK, weight_1K, bias_1, logit_B, *x_BK.shape, **constants)
        return logit_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BK, weight_1K = ctx.saved_tensors
        samples, inputs = x_BK.shape
        dx_BK = torch.empty_like(x_BK)
        programs, constants = _launch(TILES["backward"], samples, inputs)
        partial = x_BK.new_empty((programs, inputs + 1), dtype=torch.float32)
        if programs:
            kernels.logit_backward_kernel[(programs,)](
                gradients[0].contiguous(), x_BK, weight_1K, dx_BK, partial, samples, inputs, **constants
            )
        sums = column_sums(partial, torch.float32)
        return dx_BK, sums[None, :inputs].to(weight_1K.dtype), sums[inputs:].to(ctx.bias_dtype)


def logit(x_BK: Tensor, weight_1K: Tensor, bias_1: Tensor) -> Tensor:
    """See :func:`common.ops.logit.reference.logit_reference`. One launch forward; two and two small casts backward."""
    logit_B: Tensor = _Logit.apply(x_BK, weight_1K, bias_1)
    return logit_B
