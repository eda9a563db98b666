"""Residual addition and LayerNorm in front of a sub-layer: ``sum = residual + x + added``, ``normed = LayerNorm(sum)``.

LayerNorm: Ba, Kiros, Hinton, arXiv:1607.06450, with the biased variance and epsilon inside the square root. ``added``
is the bias of the matrix product that computes ``x``. The next residual connection reads the sum, the sub-layer reads
the normalised rows. Backward is one pass over both gradients; ``x`` and the residual get the same gradient. The
post-norm form of BERT, with dropout, is :mod:`common.ops.dropout_add_norm`. The kernels of both share
:mod:`common.ops.norm.rows`.

Shapes: R rows, C features.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def add_layer_norm_reference(
    x_RC: Tensor,
    residual_RC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    *,
    added_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``x + residual + added`` and its LayerNorm.

    Args:
        x_RC: result of a matrix product without bias, or any other input.
        residual_RC: matrix to add, or None.
        weight_C, bias_C: scale and shift of LayerNorm.
        eps: number that is added to the variance.
        added_C: vector to add to every row, or None.

    Returns:
        The sum and the normalised sum, (R, C) each, dtype of ``x_RC``. LayerNorm reads the rounded sum. Without
        ``residual_RC`` and ``added_C`` the sum is ``x_RC`` itself. Do not change the results in place.
    """
    sum_RC = x_RC
    if residual_RC is not None or added_C is not None:
        widened_RC = widen(x_RC)
        if added_C is not None:
            widened_RC = widened_RC + widen(added_C)
        if residual_RC is not None:
            widened_RC = widened_RC + widen(residual_RC)
        sum_RC = widened_RC.to(x_RC.dtype)
    widened_RC = widen(sum_RC)
    normed_RC = F.layer_norm(widened_RC, weight_C.shape, weight_C.to(widened_RC), bias_C.to(widened_RC), eps)
    return sum_RC, normed_RC.to(x_RC.dtype)


MOST_FEATURES = 8192
"""Largest number of features of the Triton kernels. A program keeps a whole row, and in backward two or three sums of
that size, in registers."""


ADD_LAYER_NORM = Operation(
    "add_layer_norm",
    add_layer_norm_reference,
    {
        "triton": triton_kernels("common.ops.add_layer_norm.triton:add_layer_norm", most={"features": MOST_FEATURES}),
    },
    kernel_names=(("layer norm", r"^add_layer_norm_"),),
    cases="common.ops.add_layer_norm.cases",
)
"""Signature: ``add_layer_norm(x_RC, residual_RC, weight_C, bias_C, eps, *, added_C=None)``. Size of a request:
``features``."""
