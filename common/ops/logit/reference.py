"""Reference implementation of :mod:`common.ops.logit`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


def logit_reference(x_BK: Tensor, weight_1K: Tensor, bias_1: Tensor) -> Tensor:
    """Return ``x weight^T + bias``, (B,), in fp32, or fp64 for fp64 inputs.

    Args:
        x_BK: inputs, contiguous.
        weight_1K, bias_1: parameters, in the dtype of the inputs.
    """
    return F.linear(widen(x_BK), widen(weight_1K), widen(bias_1)).squeeze(1)
