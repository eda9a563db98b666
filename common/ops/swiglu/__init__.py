"""SwiGLU of a fused product: ``silu(gate) up`` of rows ``gate | up``, also in FP8.

Shazeer, arXiv:2002.05202, section 2, without biases. The pair of functions works without autograd: the caller keeps
``saved``, the product itself or its e4m3 form, of which backward then takes its values: half the memory for one more
rounding. FP8 results are rounded from the arithmetic's own precision, with a delayed scale
(:mod:`common.ops.fp8_cast`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor
from common.ops.implementation import Implementation, always
from common.ops.swiglu.plain import Activated, SwiGlu, backward_torch, forward_torch
from common.ops.triton_support import triton_unsupported


def _forward_triton(*args: Any, **kwargs: Any) -> Activated:
    from common.ops.swiglu import triton  # triton is imported only where it is used

    return triton.forward(*args, **kwargs)


def _backward_triton(*args: Any, **kwargs: Any) -> tuple[Tensor | None, Fp8Tensor | None]:
    from common.ops.swiglu import triton  # triton is imported only where it is used

    return triton.backward(*args, **kwargs)


IMPLEMENTATIONS = {
    "triton": Implementation("triton", SwiGlu(_forward_triton, _backward_triton), triton_unsupported),
    "torch": Implementation("torch", SwiGlu(forward_torch, backward_torch), always),
}
"""Functions: :class:`SwiGlu`."""

KERNEL_NAMES = (("SwiGLU", r"^swiglu_"),)
"""Kind of work and pattern of the kernels' names, for the breakdown of a step."""
