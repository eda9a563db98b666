"""The reference of :mod:`common.ops.logit`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


def logit_reference(x_BK: Tensor, weight_1K: Tensor, bias_1: Tensor) -> Tensor:
    """Reference implementation.

    Args:
        x_BK: inputs, contiguous.
        weight_1K, bias_1: of the layer, in the dtype of the inputs.

    Returns:
        ``x weight^T + bias``, (B,), fp32 (fp64 of fp64).
    """
    return F.linear(widen(x_BK), widen(weight_1K), widen(bias_1)).squeeze(1)
