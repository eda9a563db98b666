"""Reference implementation of :mod:`common.ops.geglu`. Shapes: R rows, C features; 2C: the values, then the gates."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.triton_support import widen


def geglu_reference(x_R2C: Tensor, bias_2C: Tensor | None) -> Tensor:
    """Return ``value * gelu(gate)`` as (R, C) in the dtype of ``x_R2C``.

    Args:
        x_R2C: matrix product, without its bias.
        bias_2C: bias of the product; None for no bias.
    """
    wide_R2C = widen(x_R2C)
    if bias_2C is not None:
        wide_R2C = wide_R2C + widen(bias_2C)
    value_RC, gate_RC = wide_R2C.chunk(2, 1)
    return (value_RC * F.gelu(gate_RC)).to(x_R2C.dtype)
