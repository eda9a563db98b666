"""Weight gradients through Transformer Engine's product, which accumulates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.ops.implementation import OperationRequest
from common.ops.libraries import no_transformer_engine
from common.ops.weight_gradient.plain import Room


def unsupported(request: OperationRequest) -> str | None:
    """Why it can't serve ``request``; None if it may."""
    if request.device.type != "cuda":
        return f"Transformer Engine needs a CUDA device, not {request.device.type}"
    if request.dtype not in (torch.bfloat16, torch.float32):
        return f"gradients are bf16 or fp32, not {request.dtype}"
    return no_transformer_engine()


def accumulate(
    dy_OT: Tensor, x_IT: Tensor, dy_inverse: Tensor, x_inverse: Tensor, gradient_OI: Tensor, room: Room
) -> None:
    """See :func:`common.ops.weight_gradient.plain.accumulate_torch`; the library has a workspace of its own."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    x, dy = _engine(x_IT, x_inverse), _engine(dy_OT, dy_inverse)
    general_gemm(x, dy, out_dtype=gradient_OI.dtype, out=gradient_OI, accumulate=True)


def _engine(data: Tensor, scale_inverse: Tensor) -> Any:
    """A tensor of Transformer Engine of these FP8 values."""
    from transformer_engine.pytorch import Float8TensorStorage
    from transformer_engine.pytorch.constants import TE_DType

    return Float8TensorStorage(
        data=data.view(torch.uint8), fp8_scale_inv=scale_inverse.view(1), fp8_dtype=TE_DType[data.dtype],
        data_transpose=None,
    )  # fmt: skip
