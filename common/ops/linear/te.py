"""Products of a linear layer in FP8, with Transformer Engine's casts and products.

Formats and scales are those of :mod:`common.ops.linear.fp8`: e4m3 for inputs and weights, e5m2 for gradients, one
scale per tensor and rank, computed from the largest magnitude of the last use. The differences come from the library:
a kernel that casts and transposes, a constant first scale, its own calls of cuBLASLt, and gradients that accumulate in
fp32 registers between steps of the tensor cores. Without gradients, as in evaluation, products run in the dtype of the
weights and scales do not change.

The buffers here hold the state. The library's modules keep theirs outside of buffers, so neither checkpoints nor a
warm-up that restores buffers would include it. Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ops.fp8_cast.reference import E4M3, E5M2
from common.ops.libraries import TRANSFORMER_ENGINE
from common.ops.linear import fp8
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT
from common.ops.operation import OperationRequest


def unsupported(request: OperationRequest) -> str | None:
    """Return why Transformer Engine cannot serve ``request``; None if it can."""
    if request.device.type != "cuda":
        return f"Transformer Engine needs a CUDA device, not {request.device.type}"
    return fp8.unsupported(request) or TRANSFORMER_ENGINE.unavailable()


class TeProduct(nn.Module):
    """A product ``x weight^T + bias`` in FP8 with the scales of one layer.

    Args:
        weight: (N, K) weight of the layer, with its final device and dtype.

    Attributes:
        scales: fp32 (3,), scales of the next input, weight and gradient. Saved in checkpoints.
        amaxes: fp32 (1, 3), scratch of the casts; zeros between casts.

    Raises:
        UnsupportedImplementation: N or K is not a multiple of 16.
    """

    scales: Tensor
    amaxes: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        fp8.check_weight(weight)
        scales = [1.0, 1.0, first_gradient_scale(weight.dtype)]
        self.register_buffer("scales", torch.tensor(scales, dtype=torch.float32, device=weight.device))
        self.register_buffer("amaxes", torch.zeros(1, 3, dtype=torch.float32, device=weight.device), persistent=False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x weight^T + bias`` as (..., N) in the dtype of the weight; not in FP8 if gradients are disabled.

        Args:
            x: (..., K) in the dtype of the weight; the number of rows is a multiple of 16.
            weight: (N, K).
            bias: (N,) or None.

        Raises:
            UnsupportedImplementation: the number of rows is not a multiple of 16, or 0.
        """
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        x_TK = x.flatten(0, -2)
        fp8.check_rows(len(x_TK))
        result: Tensor = _TeFunction.apply(x_TK, weight, bias, self)
        return result.view(*x.shape[:-1], -1)

    def cast(self, tensor: Tensor, role: int, transpose: bool) -> Any:
        """Return :func:`cast` of a tensor in the role ``INPUT``, ``WEIGHT`` or ``GRADIENT``."""
        return cast(tensor, self.scales[role], self.amaxes[0, role : role + 1], _format(role), transpose)

    def advance(self, first: int, last: int) -> None:
        """Call :func:`advance` for the roles ``first`` to ``last``, both included, which must have one format."""
        advance(self.amaxes[:, first : last + 1], self.scales[first : last + 1], _format(first))

    def _apply(self, fn: Any, recurse: bool = True) -> TeProduct:
        """Move the buffers, but keep them in fp32 when the model is cast to half precision."""
        scales, amaxes = self.scales, self.amaxes
        super()._apply(fn, recurse)
        self.scales, self.amaxes = scales.to(self.scales.device), amaxes.to(self.amaxes.device)
        return self


def cast(tensor: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype, transpose: bool) -> Any:
    """Return the FP8 tensor of Transformer Engine.

    Args:
        tensor: fp16 or bf16.
        scale: 0-d fp32.
        amax: fp32 (1,), raised to the largest magnitude.
        dtype: ``E4M3`` or ``E5M2``.
        transpose: whether the result includes the transpose.
    """
    from transformer_engine.pytorch import Float8Quantizer
    from transformer_engine.pytorch.constants import TE_DType

    quantizer = Float8Quantizer(scale, amax, TE_DType[dtype], columnwise=transpose)
    quantizer.internal = True
    return quantizer(tensor)


def advance(amaxes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Compute the next scales from the largest magnitudes.

    A magnitude that is 0 or not finite leaves its scale unchanged.

    Args:
        amaxes: fp32 (1, n), set to zeros.
        scales: fp32 (n,).
        dtype: FP8 format of all of them.
    """
    from transformer_engine.pytorch.constants import TE_DType, tex

    # the first argument can hold maxima over ranks; here it is this rank's, which all threads read before one clears it
    tex.fused_amax_and_scale_update_after_reduction(amaxes[0], [amaxes], [scales], "most_recent", TE_DType[dtype], 0.0)


def _format(role: int) -> torch.dtype:
    return E5M2 if role == GRADIENT else E4M3


def first_gradient_scale(dtype: torch.dtype) -> float:
    """Return the first scale of the gradients.

    A scale of 1 would round everything below 2^-17 to 0 in e5m2, and then only one layer per step, from the last to
    the first, would get a correct scale. fp16 has a loss scale against this, bf16 has none.
    """
    return 2.0**16 if dtype == torch.bfloat16 else 1.0


class _TeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Tensor, bias: Tensor | None, product: TeProduct) -> Tensor:
        from transformer_engine.pytorch import prepare_for_saving
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x8 = product.cast(x_TK, INPUT, needs_dw)
        w8 = product.cast(weight, WEIGHT, needs_dx)
        product.advance(INPUT, WEIGHT)
        y_TN, *_ = general_gemm(w8, x8, out_dtype=weight.dtype, bias=bias)
        x8.update_usage(rowwise_usage=False, columnwise_usage=needs_dw)
        w8.update_usage(rowwise_usage=False, columnwise_usage=needs_dx)
        tensors, ctx.objects = prepare_for_saving(x8, w8)
        ctx.save_for_backward(*tensors)
        ctx.product = product
        result: Tensor = y_TN
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from transformer_engine.pytorch import restore_from_saved
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        x8, w8 = restore_from_saved(ctx.objects, list(ctx.saved_tensors))
        dy_TN = gradients[0]
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy8 = ctx.product.cast(dy_TN, GRADIENT, needs_dw)
        ctx.product.advance(GRADIENT, GRADIENT)
        dx_TK = dw_NK = None
        precise = {"out_dtype": dy_TN.dtype, "grad": True, "use_split_accumulator": True}
        if needs_dx:
            dx_TK, *_ = general_gemm(w8, dy8, layout="NN", **precise)
        if needs_dw:
            dw_NK, *_ = general_gemm(x8, dy8, layout="NT", **precise)
        return dx_TK, dw_NK, dy_TN.sum(0) if needs_db else None, None
