"""Dot interaction: products of all pairs of a sample's vectors, appended to the first vector.

Naumov et al., arXiv:1906.00091, section 2.1. Shapes: B samples, F vectors (one of the bottom MLP and one per table),
W width of a vector, Y columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class DotPasses(NamedTuple):
    """Forward and backward pass of an implementation. Autograd does not record them.

    Attributes:
        forward: computes y from (x, columns).
        backward: computes dx from (dy, x).
    """

    forward: Callable[[Tensor, int], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class DotInteraction(torch.autograd.Function):
    """Autograd function that calls the passes of an implementation. It saves x for the backward pass."""

    @staticmethod
    def forward(ctx: Any, passes: DotPasses, x_BFW: Tensor, columns: int) -> Tensor:
        ctx.save_for_backward(x_BFW)
        ctx.passes = passes
        return passes.forward(x_BFW, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.passes.backward(gradients[0], *ctx.saved_tensors), None


def _triangle(x_BFW: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column indices of the strictly lower triangle, row by row: (1, 0), (2, 0), (2, 1), ..."""
    vectors = x_BFW.shape[1]
    row, column = torch.tril_indices(vectors, vectors, -1, device=x_BFW.device)
    return row, column


def forward_reference(x_BFW: Tensor, columns: int) -> Tensor:
    """Return (B, columns): the first vector, the dot products of all pairs row by row, then zeros.

    Computes the complete Gram matrix.
    """
    row, column = _triangle(x_BFW)
    widened_BFW = widen(x_BFW)
    gram_BFF = widened_BFW @ widened_BFW.transpose(1, 2)
    y_BY = torch.cat([x_BFW[:, 0], gram_BFF[:, row, column].to(x_BFW.dtype)], 1)
    return F.pad(y_BY, (0, columns - y_BY.shape[1]))


def backward_reference(dy_BY: Tensor, x_BFW: Tensor) -> Tensor:
    """Return dx (B, F, W): the symmetric gradient of the Gram matrix times x, plus dy's columns of the first vector."""
    samples, vectors, width = x_BFW.shape
    row, column = _triangle(x_BFW)
    dy_BY = widen(dy_BY)
    dgram_BFF = dy_BY.new_zeros(samples, vectors, vectors)
    dgram_BFF[:, row, column] = dgram_BFF[:, column, row] = dy_BY[:, width : width + len(row)]
    dx_BFW = dgram_BFF @ widen(x_BFW)
    dx_BFW[:, 0] += dy_BY[:, :width]
    return dx_BFW.to(x_BFW.dtype)


PASSES = DotPasses(forward_reference, backward_reference)


def dot_interaction_reference(x_BFW: Tensor, columns: int) -> Tensor:
    """Compute the dot interaction.

    Args:
        x_BFW: F vectors of width W per sample, the bottom MLP's first; contiguous.
        columns: columns of the result, at least W + F (F - 1) / 2; the rest is zero.

    Returns:
        (B, columns), in the dtype of ``x_BFW``: the first vector, then the products of all pairs of vectors, row by
        row of the strictly lower triangle of their Gram matrix.
    """
    return apply(PASSES, x_BFW, columns)


def apply(passes: DotPasses, x_BFW: Tensor, columns: int) -> Tensor:
    """Return the dot interaction (B, columns), with autograd around ``passes``.

    Raises:
        ValueError: ``columns`` is too small for the result.
    """
    _, vectors, width = x_BFW.shape
    needed = width + vectors * (vectors - 1) // 2
    if columns < needed:
        raise ValueError(f"the interaction of {vectors} vectors of {width} has {needed} columns, not {columns}")
    y_BY: Tensor = DotInteraction.apply(passes, x_BFW, columns)
    return y_BY


DOT_INTERACTION = Operation(
    "dot_interaction",
    dot_interaction_reference,
    {
        "triton": triton_kernels("benchmarks.dlrm.ops.dot_interaction.triton:dot_interaction"),
    },
    kernel_names=(("dot interaction", r"^dot_interaction_"),),
    cases="benchmarks.dlrm.ops.dot_interaction.cases",
)
"""Signature: ``dot_interaction(x_BFW, columns)``."""
