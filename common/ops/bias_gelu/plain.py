"""The plain version of :mod:`common.ops.bias_gelu`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


def bias_gelu_torch(x_TF: Tensor, bias_F: Tensor) -> Tensor:
    """Plain version.

    Args:
        x_TF: the product, without its bias.
        bias_F: the bias.

    Returns:
        (T, F), dtype of ``x_TF``.
    """
    return F.gelu(widen(x_TF) + widen(bias_F), approximate="tanh").to(x_TF.dtype)
