"""The ends of blocks: what a product or a convolution made, with its bias, and what stood before it.

The gradient of such a sum is the gradient of both, and its sums over all places are that of the bias.

Legend: N images, C channels, H height, W width, R = N H W rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.bias_gradient import RowSums


def rows_of(x_NCHW: Tensor) -> Tensor:
    """(R, C), a view of a tensor in channels_last memory.

    Raises:
        RuntimeError: it isn't.
    """
    return x_NCHW.permute(0, 2, 3, 1).view(-1, x_NCHW.shape[1])


def maps_of(x_RC: Tensor, like_NCHW: Tensor) -> Tensor:
    """(N, C, H, W) in channels_last memory, a view of rows, in the images of ``like_NCHW``."""
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
    """``y + residual``, where ``y`` holds the bias already.

    Args:
        y_RC: made with the detached bias.
        bias_C: gets its gradient here.
        residual_RC: what stood before.
        row_sums: sums a gradient over its rows.
    """
    result: Tensor = _AddResidual.apply(y_RC, bias_C, residual_RC, row_sums)
    return result
