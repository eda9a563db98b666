"""Factors of the triangle multiplication, gated, masked and channel first, from one matrix product.

``a = mask sigmoid(a_gate) a_projection``, and the same for b (Jumper et al. 2021, supplementary algorithms 11 and 12,
line 2). Both factors are written channel first, as the batched matrix product over the third residue reads them.

Shapes: P pairs, of one or several samples, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


def triangle_gate_reference(projected_P4C: Tensor, mask_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors a and b, (C, P) each, contiguous.

    Args:
        projected_P4C: result of one linear layer with bias: projection and gate of a, then those of b, (P, 4 C).
        mask_P: 1 for pairs that exist, 0 for padding; any dtype.
    """
    a_PC, a_gate_PC, b_PC, b_gate_PC = widen(projected_P4C).chunk(4, 1)
    mask_P1 = mask_P.to(a_PC.dtype).unsqueeze(1)
    a_PC, b_PC = mask_P1 * torch.sigmoid(a_gate_PC) * a_PC, mask_P1 * torch.sigmoid(b_gate_PC) * b_PC
    return a_PC.t().to(projected_P4C.dtype).contiguous(), b_PC.t().to(projected_P4C.dtype).contiguous()


TRIANGLE_GATE = Operation(
    "triangle_gate",
    triangle_gate_reference,
    {"triton": triton_kernels("benchmarks.openfold.ops.triangle_gate.triton:triangle_gate")},
    kernel_names=(("gates of the triangle multiplication", r"^triangle_gate_"),),
    cases="benchmarks.openfold.ops.triangle_gate.cases",
)
"""Signature: ``triangle_gate(projected_P4C, mask_P)``."""
