"""Rotary positions on queries and keys, and the split of their fused product, also back in FP8.

Su et al., arXiv:2104.09864, section 3.4.2, in the pairing of dimension i with i + D/2 (GPT-NeoX, Llama): a pair is
turned by ``position * base^(-2i / D)``. One pass takes a product ``q | k | v`` apart into contiguous tensors and turns
q and k; backward turns their gradients back and puts them together. Without autograd: nothing but the tables is kept.
FP8 results are rounded from the arithmetic's own precision, with a delayed scale (:mod:`common.ops.fp8_cast`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor
from common.ops.implementation import Implementation, always
from common.ops.rope.plain import Rope, RopeScaling, backward_torch, forward_torch, tables
from common.ops.triton_support import triton_unsupported

__all__ = ["IMPLEMENTATIONS", "KERNEL_NAMES", "RopeScaling", "tables"]


def _forward_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from common.ops.rope import triton  # triton is imported only where it is used

    return triton.forward(*args)


def _backward_triton(*args: Any, **kwargs: Any) -> tuple[Tensor | None, Fp8Tensor | None]:
    from common.ops.rope import triton  # triton is imported only where it is used

    return triton.backward(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", Rope(_forward_triton, _backward_triton), triton_unsupported),
    "torch": Implementation("torch", Rope(forward_torch, backward_torch), always),
}
"""Functions: :class:`Rope`."""

KERNEL_NAMES = (("RoPE", r"^rope_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
