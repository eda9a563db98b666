"""The plain version of :mod:`benchmarks.dlrm.ops.dot_interaction`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.triton_support import widen


@functools.cache
def triangle(vectors: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns of the strictly lower triangle, row by row: (1, 0), (2, 0), (2, 1), ..."""
    row, column = torch.tril_indices(vectors, vectors, -1, device=device)
    return row, column


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BFW: Tensor, columns: int) -> Tensor:
        ctx.save_for_backward(x_BFW)
        row, column = triangle(x_BFW.shape[1], x_BFW.device)
        wide_BFW = widen(x_BFW)
        gram_BFF = wide_BFW @ wide_BFW.transpose(1, 2)
        product_BP = gram_BFF[:, row, column].to(x_BFW.dtype)
        y_BY = torch.cat([x_BFW[:, 0], product_BP], 1)
        return torch.nn.functional.pad(y_BY, (0, columns - y_BY.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x_BFW,) = ctx.saved_tensors
        samples, vectors, width = x_BFW.shape
        row, column = triangle(vectors, x_BFW.device)
        dy_BY = widen(gradients[0])
        dgram_BFF = dy_BY.new_zeros(samples, vectors, vectors)
        dgram_BFF[:, row, column] = dgram_BFF[:, column, row] = dy_BY[:, width : width + len(row)]
        dx_BFW = dgram_BFF @ widen(x_BFW)
        dx_BFW[:, 0] += dy_BY[:, :width]
        return dx_BFW.to(x_BFW.dtype), None


def dot_interaction_torch(x_BFW: Tensor, columns: int) -> Tensor:
    """Plain version.

    Args:
        x_BFW: F vectors of W of every sample, the bottom MLP's first.
        columns: of the result, W + F (F - 1) / 2 or more; those beyond are zeros.

    Returns:
        (B, columns), in the dtype of ``x_BFW``: the first vector, then the products of all pairs of vectors, row by
        row of the strictly lower triangle of their Gram matrix.
    """
    y_BY: Tensor = _DotInteraction.apply(x_BFW, columns)
    return y_BY
