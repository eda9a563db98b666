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
    """Reference implementation.

    Args:
        x_RC: a product, without its bias, or the first sum.
        residual_RC: added to it, or None for nothing.
        weight_C, bias_C: scale and shift after normalising.
        eps: added to the variance.
        added_C: added to every row, or None for nothing.

    Returns:
        The sum and the normalised sum, (R, C) each, dtype of ``x_RC``. What is normalised is the sum as it was rounded.
        With nothing to add the sum is ``x_RC``. Neither may be changed in place.
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
