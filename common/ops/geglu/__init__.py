"""GEGLU of a matrix product and its bias: ``value * gelu(gate)``, value and gate side by side, value first.

Shazeer, arXiv:2002.05202, section 2, with the GELU of Hendrycks, Gimpel, arXiv:1606.08415, in its exact form
``0.5 z (1 + erf(z / sqrt(2)))``. The bias of the product is added where the product is read, and its gradient comes out
of the pass that writes the product's.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.geglu.plain import geglu_torch
from common.ops.implementation import Implementation, always
from common.ops.triton_support import triton_unsupported


def _geglu_triton(x_R2C: Tensor, bias_2C: Tensor | None) -> Tensor:
    from common.ops.geglu.triton import geglu  # triton is imported only where it is used

    return geglu(x_R2C, bias_2C)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", _geglu_triton, triton_unsupported),
    "torch": Implementation("torch", geglu_torch, always),
}
"""Signature: ``geglu(x_R2C, bias_2C)``."""

KERNEL_NAMES = (("GEGLU", r"^geglu_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
