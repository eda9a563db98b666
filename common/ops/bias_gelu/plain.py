"""The plain version of :mod:`common.ops.bias_gelu`."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from common.ops.fp8_cast.plain import E4M3, Fp8Tensor, Handover, Scaling, computed_torch, widened
from common.ops.triton_support import widen


def bias_gelu_torch(
    x_TF: Tensor, bias_F: Tensor, *, fp8: Scaling | None = None, handover: Handover | None = None
) -> Tensor | Fp8Tensor:
    """Plain version.

    Args:
        x_TF: the product, without its bias.
        bias_F: the bias.
        fp8: scale of the result in e4m3, which then takes the place of the one in 16 bits.
        handover: of the gradient of ``x_TF``, if that is wanted in e5m2.

    Returns:
        (T, F), dtype of ``x_TF``, or in FP8.
    """
    y_TF = F.gelu(widened(x_TF, handover) + widen(bias_F), approximate="tanh")
    if fp8 is None:
        return y_TF.to(x_TF.dtype)
    return replace(computed_torch(y_TF, fp8, E4M3, x_TF.dtype), source=y_TF.to(x_TF.dtype))
