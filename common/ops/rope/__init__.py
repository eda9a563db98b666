"""Rotary positions on queries and keys, and the split of their fused product, also back in FP8.

Su et al., arXiv:2104.09864, section 3.4.2, in the pairing of dimension i with i + D/2 (GPT-NeoX, Llama): a pair is
turned by ``position * base^(-2i / D)``. One pass takes a product ``q | k | v`` apart into contiguous tensors and turns
q and k; backward turns their gradients back and puts them together. Without autograd: nothing but the tables is kept.
FP8 results are rounded from the arithmetic's own precision, with a delayed scale (:mod:`common.ops.fp8_cast`).
"""

from __future__ import annotations

from common.ops.operation import Operation
from common.ops.rope.reference import Rope, RopeScaling, backward_reference, forward_reference, tables
from common.ops.triton_support import triton_kernels

__all__ = ["ROPE", "RopeScaling", "tables"]


ROPE = Operation(
    "rope",
    Rope(forward_reference, backward_reference),
    {
        "triton": triton_kernels("common.ops.rope.triton"),
    },
    kernel_names=(("RoPE", r"^rope_"),),
    cases="common.ops.rope.cases",
)
"""Functions: :class:`Rope`."""
