"""GEGLU of a matrix product and its bias: ``value * gelu(gate)``. Each row holds all values, then all gates.

GEGLU is from Shazeer, arXiv:2002.05202, section 2. The GELU is exact: ``0.5 z (1 + erf(z / sqrt(2)))`` (Hendrycks,
Gimpel, arXiv:1606.08415). The bias of the product is added when the product is read. The pass that writes the gradient
of the product also computes the gradient of the bias.

Shapes: R rows, C features; 2C: the values, then the gates.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def geglu_reference(x_R2C: Tensor, bias_2C: Tensor | None) -> Tensor:
    """Return ``value * gelu(gate)`` as (R, C) in the dtype of ``x_R2C``.

    Args:
        x_R2C: matrix product, without its bias.
        bias_2C: bias of the product; None for no bias.
    """
    widened_R2C = widen(x_R2C)
    if bias_2C is not None:
        widened_R2C = widened_R2C + widen(bias_2C)
    value_RC, gate_RC = widened_R2C.chunk(2, 1)
    return (value_RC * F.gelu(gate_RC)).to(x_R2C.dtype)


GEGLU = Operation(
    "geglu",
    geglu_reference,
    {
        "triton": triton_kernels("common.ops.geglu.triton:geglu"),
    },
    kernel_names=(("GEGLU", r"^geglu_"),),
    cases="common.ops.geglu.cases",
)
"""Signature: ``geglu(x_R2C, bias_2C)``."""
