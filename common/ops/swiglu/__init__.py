"""SwiGLU of a fused product: ``silu(gate) up`` of rows ``gate | up``, optionally in FP8.

Shazeer, arXiv:2002.05202, section 2, without biases. The functions work without autograd. The caller keeps ``saved``
for the backward pass: the product itself, or its e4m3 form, which takes half the memory for one more rounding. FP8
results are rounded directly from fp32, with a delayed scale (:mod:`common.ops.fp8_cast`).

Shapes: T tokens, F features; 2F: gates, then values ("up").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.fp8_cast.reference import E4M3, E5M2, Activated, Fp8Tensor, Scaling, computed_reference, widen_fp8
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen


class SwiGlu(NamedTuple):
    """Functions of an implementation; see :func:`forward_reference` and :func:`backward_reference`."""

    forward: Callable[..., Activated]
    backward: Callable[..., tuple[Tensor | None, Fp8Tensor | None]]


@torch.no_grad()
def forward_reference(
    gate_up_T2F: Tensor,
    *,
    fp8: Scaling | None = None,
    save_fp8: Scaling | None = None,
    frozen_scales: bool = False,
) -> Activated:
    """Compute SwiGLU, and the tensor to save for the backward pass.

    Args:
        gate_up_T2F: product; contiguous.
        fp8: scale of the result in e4m3, which then replaces y; None for no FP8.
        save_fp8: scale of the product in e4m3; None to save the product itself.
        frozen_scales: leave the scales as they are.
    """
    dtype = gate_up_T2F.dtype
    widened_T2F = widen(gate_up_T2F)
    gate_TF, up_TF = widened_T2F.chunk(2, 1)
    y_TF = gate_TF * gate_TF.sigmoid() * up_TF
    y8 = None if fp8 is None else computed_reference(y_TF, fp8, E4M3, dtype, frozen_scales)
    saved = gate_up_T2F if save_fp8 is None else computed_reference(widened_T2F, save_fp8, E4M3, dtype, frozen_scales)
    return Activated(y_TF.to(dtype) if y8 is None else None, y8, saved)


@torch.no_grad()
def backward_reference(
    dy_TF: Tensor, saved: Tensor | Fp8Tensor, *, fp8: Scaling | None = None, frozen_scales: bool = False
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """Return the gradient of the product, (T, 2F), as a pair: in the dtype of ``dy_TF``, or in FP8. The other is None.

    Args:
        dy_TF: gradient of the result; contiguous.
        saved: result of the forward pass, see :class:`Activated`.
        fp8: scale of the gradient in e5m2; None for no FP8.
        frozen_scales: leave the scale as it is.
    """
    dy_widened_TF = widen(dy_TF)
    widened_T2F = widen_fp8(saved).to(dy_widened_TF.dtype) if isinstance(saved, Fp8Tensor) else widen(saved)
    gate_TF, up_TF = widened_T2F.chunk(2, 1)
    sigmoid_TF = gate_TF.sigmoid()
    d_gate_TF = dy_widened_TF * up_TF * sigmoid_TF * (1 + gate_TF * (1 - sigmoid_TF))
    d_gate_up_T2F = torch.cat([d_gate_TF, dy_widened_TF * gate_TF * sigmoid_TF], 1)
    if fp8 is None:
        return d_gate_up_T2F.to(dy_TF.dtype), None
    return None, computed_reference(d_gate_up_T2F, fp8, E5M2, dy_TF.dtype, frozen_scales)


SWIGLU = Operation(
    "swiglu",
    SwiGlu(forward_reference, backward_reference),
    {
        "triton": triton_kernels("common.ops.swiglu.triton"),
    },
    kernel_names=(("SwiGLU", r"^swiglu_"),),
    cases="common.ops.swiglu.cases",
)
"""Functions: :class:`SwiGlu`."""
