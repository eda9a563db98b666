"""Addition of a biased product or convolution and its residual, with a fast gradient of the bias.

The gradient of the sum is also the gradient of both terms; summed over positions, it is the gradient of the bias.

Legend: N images, C channels, H height, W width, R = N H W rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.bias_gradient import RowSums


def rows_of(x_NCHW: Tensor) -> Tensor:
    """Return a view (R, C) of a tensor in channels_last memory.

    Raises:
        RuntimeError: the tensor is not in channels_last memory.
    """
    return x_NCHW.permute(0, 2, 3, 1).view(-1, x_NCHW.shape[1])


def maps_of(x_RC: Tensor, like_NCHW: Tensor) -> Tensor:
    """Return a view of rows as (N, C, H, W) in channels_last memory, with N, H and W of ``like_NCHW``."""
    images, _, height, width = like_NCHW.shape
    return x_RC.view(images, height, width, -1).permute(0, 3, 1, 2)


class _AddResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RC: Tensor, bias_C: Tensor, residual_RC: Tensor, row_sums: RowSums) -> Tensor:
        ctx.row_sums, ctx.dtype = row_sums, bias_C.dtype
        return y_RC + residual_RC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RC: Tensor) -> tuple[Tensor | None, ...]:
        d_RC = d_RC.contiguous()
        return d_RC, ctx.row_sums(d_RC, ctx.dtype), d_RC, None


def add_residual(y_RC: Tensor, bias_C: Tensor, residual_RC: Tensor, row_sums: RowSums) -> Tensor:
    """Return ``y + residual``, where ``y`` already includes the bias.

    Args:
        y_RC: computed with the detached bias.
        bias_C: receives its gradient here.
        row_sums: function that sums the gradient over rows.
    """
    result: Tensor = _AddResidual.apply(y_RC, bias_C, residual_RC, row_sums)
    return result
