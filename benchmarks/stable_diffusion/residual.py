"""Ends of a residual block: addition of the residual, or of a 1x1 shortcut over one or two inputs.

The gradient of a sum is also the gradient of both terms; summed over positions, it is the gradient of the bias. The
two inputs of a shortcut are never concatenated: each has a product with its own columns of the weight, and the second
product is added to the first. The first product also adds the biases of both convolutions.

Legend: N images, C channels (of all inputs together), O output channels, H height, W width, R = N H W rows.
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
    """Return ``y + residual``, (R, C), where ``y`` already includes the bias.

    Args:
        y_RC: computed with the detached bias.
        bias_C: receives its gradient here.
        row_sums: function that sums the gradient over rows.
    """
    result: Tensor = _AddResidual.apply(y_RC, bias_C, residual_RC, row_sums)
    return result


class _AddShortcut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_NOHW: Tensor, bias_O: Tensor, weight_OC11: Tensor, row_sums: RowSums, *inputs: Tensor
    ) -> Tensor:
        weights = _columns(weight_OC11, inputs)
        rows = [rows_of(x_NCHW) for x_NCHW in inputs]
        sum_RO = torch.addmm(bias_O, rows[0], weights[0].t())
        for x_RC, weight_OC in zip(rows[1:], weights[1:], strict=True):
            sum_RO.addmm_(x_RC, weight_OC.t())
        sum_RO.add_(rows_of(y_NOHW))
        ctx.save_for_backward(weight_OC11, *inputs)
        ctx.row_sums, ctx.dtype = row_sums, bias_O.dtype
        return maps_of(sum_RO, y_NOHW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NOHW: Tensor) -> tuple[Tensor | None, ...]:
        weight_OC11, *inputs = ctx.saved_tensors
        d_NOHW = d_NOHW.contiguous(memory_format=torch.channels_last)
        d_RO = rows_of(d_NOHW)
        # concatenated afterwards: the weight is small, and compilers support no other way
        d_weight_OC = torch.cat([d_RO.t() @ rows_of(x_NCHW) for x_NCHW in inputs], 1)
        d_inputs = [maps_of(d_RO @ weight_OC, d_NOHW) for weight_OC in _columns(weight_OC11, inputs)]
        d_bias_O = ctx.row_sums(d_RO, ctx.dtype)
        return d_NOHW, d_bias_O, d_weight_OC.view_as(weight_OC11), None, *d_inputs


def _columns(weight_OC11: Tensor, inputs: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, ...]:
    """Return the columns of the weight for each input."""
    return weight_OC11.view(weight_OC11.shape[:2]).split([x_NCHW.shape[1] for x_NCHW in inputs], 1)


def add_shortcut(
    y_NOHW: Tensor, bias_O: Tensor, weight_OC11: Tensor, inputs: tuple[Tensor, ...], row_sums: RowSums
) -> Tensor:
    """Return ``y + bias + conv1x1(cat(inputs), weight)``: (N, O, H, W) in channels_last memory.

    Args:
        y_NOHW: output of the last convolution without its bias, in channels_last memory.
        bias_O: sum of the biases of both convolutions.
        inputs: one or two (N, C_i, H, W) in channels_last memory.
        row_sums: function that sums the gradient over rows.
    """
    result: Tensor = _AddShortcut.apply(y_NOHW, bias_O, weight_OC11, row_sums, *inputs)
    return result
