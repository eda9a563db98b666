"""Weight gradient from FP8 operands, added to the gradient of earlier micro-batches.

``gradient += dy^T x``. Both operands are given transposed, because a Hopper GPU multiplies FP8 matrices only if the
summed dimension is contiguous in both. ``torch._scaled_mm`` cannot add: its product is written and then added, which
moves 8 bytes per weight of a bf16 gradient instead of 4. A direct call of cuBLASLt adds within the product and rounds
once to the dtype of the gradient. For 16-bit operands PyTorch's product can add (:func:`add_product_`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.ops.operation import Implementation, Operation, OperationRequest
from common.ops.weight_gradient.cublaslt import Scratch, library


@torch.no_grad()
def accumulate_reference(
    dy_OT: Tensor, x_IT: Tensor, dy_inverse: Tensor, x_inverse: Tensor, gradient_OI: Tensor, scratch: Scratch
) -> None:
    """Add ``dy^T x`` to the gradient. The reference writes the product in the gradient's dtype, then adds it.

    Args:
        dy_OT, x_IT: FP8, contiguous.
        dy_inverse, x_inverse: inverse scales, 0-d fp32.
        gradient_OI: fp16, bf16 or fp32, contiguous.
    """
    product_OI = scratch(gradient_OI.shape, gradient_OI.dtype)
    torch._scaled_mm(
        dy_OT, x_IT.t(), dy_inverse, x_inverse, out_dtype=gradient_OI.dtype, use_fast_accum=True, out=product_OI
    )
    gradient_OI.add_(product_OI)


def add_product_(gradient_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """Add ``dy^T x`` to the gradient within the product. Sums are in fp32 and rounded once, to the gradient's dtype.

    On a GPU only the gradient is written. Shapes: T tokens, O output and I input features of a weight.

    Args:
        gradient_OI: dtype of the operands, or fp32 for 16-bit operands.
    """
    if gradient_OI.dtype == x_TI.dtype:
        gradient_OI.addmm_(dy_TO.t(), x_TI)
    elif gradient_OI.is_cuda:
        torch.addmm(gradient_OI, dy_TO.t(), x_TI, out_dtype=gradient_OI.dtype, out=gradient_OI)
    else:  # on a CPU, PyTorch has no product of mixed dtypes
        gradient_OI.addmm_(dy_TO.t().to(gradient_OI.dtype), x_TI.to(gradient_OI.dtype))


def _unsupported(request: OperationRequest) -> str | None:
    if request.device.type != "cuda":
        return f"cuBLASLt needs a CUDA device, not {request.device.type}"
    if request.dtype not in (torch.bfloat16, torch.float32):
        return f"cuBLASLt adds to gradients in bf16 and fp32, not in {request.dtype}"
    if torch.version.cuda is None:
        return "PyTorch is built without CUDA"
    try:
        library()
    except OSError as error:
        return f"cuBLASLt cannot be loaded: {error}"
    return None


WEIGHT_GRADIENT = Operation(
    "weight_gradient",
    accumulate_reference,
    {
        "cublaslt": Implementation("common.ops.weight_gradient.cublaslt:accumulate", _unsupported),
    },
    cases="common.ops.weight_gradient.cases",
)
"""Signature: that of :func:`accumulate_reference`. The dtype of a request is that of the weight. The gradient has this
dtype, or fp32, which all implementations support."""
