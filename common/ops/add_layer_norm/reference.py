"""The reference of :mod:`common.ops.add_layer_norm`. Shapes: R rows, C features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


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
        wide_RC = widen(x_RC)
        if added_C is not None:
            wide_RC = wide_RC + widen(added_C)
        if residual_RC is not None:
            wide_RC = wide_RC + widen(residual_RC)
        sum_RC = wide_RC.to(x_RC.dtype)
    wide_RC = widen(sum_RC)
    normed_RC = F.layer_norm(wide_RC, weight_C.shape, weight_C.to(wide_RC), bias_C.to(wide_RC), eps)
    return sum_RC, normed_RC.to(x_RC.dtype)
