"""Rotary positions of queries and keys, and the split of their fused product; the gradient can be in FP8.

Su et al., arXiv:2104.09864, section 3.4.2. Dimensions i and i + D/2 form a pair (GPT-NeoX, Llama), which is rotated by
``position * base^(-2i / D)``. One pass splits a product ``q | k | v`` into contiguous tensors and rotates q and k. The
backward pass rotates their gradients back and joins them. The functions work without autograd, and the caller keeps
only the tables. FP8 results are rounded from fp32, with a delayed scale (:mod:`common.ops.fp8_cast`).
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
