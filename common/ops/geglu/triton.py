"""GEGLU after a bias with the Triton kernels of :mod:`common.ops.geglu.kernels`.

All work is enqueued on the current stream, and the host never waits for the device. Shapes: R rows, C features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.geglu import kernels
from common.ops.tile import Tile
from common.ops.tiling.column_sums import column_sums
from common.ops.tiling.tiles import cut
from common.ops.triton_support import require_contiguous

TILES: dict[str, Tile] = {
    "forward": Tile(columns=512, elements=2048, warps=4, programs=8, stages=2),
    "backward": Tile(columns=512, elements=1024, warps=8, programs=4, stages=1),
}
"""Tile of each pass."""


def forward(x_R2C: Tensor, bias_2C: Tensor | None) -> Tensor:
    """Return the result (R, C). Launches one kernel."""
    require_contiguous(bias=bias_2C)
    rows, features = x_R2C.shape[0], x_R2C.shape[1] // 2
    y_RC = x_R2C.new_empty((rows, features))
    grid, arguments = cut(TILES["forward"], 1, rows, features, x_R2C.device, reverse=False)
    kernels.geglu_forward_kernel[grid](x_R2C, bias_2C, y_RC, rows, features, BIAS=bias_2C is not None, **arguments)
    return y_RC


def backward(dy_RC: Tensor, x_R2C: Tensor, bias_2C: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x (R, 2C) and of the bias, in its dtype. Launches one kernel, or two with a bias."""
    rows, features = dy_RC.shape
    dx_R2C = torch.empty_like(x_R2C)
    grid, arguments = cut(TILES["backward"], 1, rows, features, x_R2C.device, reverse=False)
    partial_P2C = x_R2C.new_empty((0 if bias_2C is None else grid[0], 2 * features), dtype=torch.float32)
    kernels.geglu_backward_kernel[grid](
        dy_RC, x_R2C, bias_2C, dx_R2C, partial_P2C, rows, features, BIAS=bias_2C is not None, **arguments
    )
    return dx_R2C, None if bias_2C is None else column_sums(partial_P2C, bias_2C.dtype)


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_R2C: Tensor, bias_2C: Tensor | None) -> Tensor:
        x_R2C = x_R2C.contiguous()
        ctx.save_for_backward(x_R2C, bias_2C)
        return forward(x_R2C, bias_2C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_R2C, bias_2C = ctx.saved_tensors
        return backward(gradients[0].contiguous(), x_R2C, bias_2C)


def geglu(x_R2C: Tensor, bias_2C: Tensor | None) -> Tensor:
    """See :func:`common.ops.geglu.reference.geglu_reference`."""
    result: Tensor = _Geglu.apply(x_R2C, bias_2C)
    return result
