"""Linear layer with bias and ReLU in the epilogue of its product, with a hand-written backward pass.

One pass computes the gradient in front of the ReLU and the gradient of the bias. Of the activations only input and
result are kept. Shapes: B samples, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


class LinearReluPasses(NamedTuple):
    """Functions of an implementation, which run without autograd.

    Attributes:
        forward: maps (x, weight, bias) to y.
        masked: maps (dy, y) to dy where y is positive (else 0), and its column sums in fp32, or fp64 for fp64 inputs.
    """

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    masked: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class LinearRelu(torch.autograd.Function):
    """Autograd function of an implementation. Keeps x, the weight and y, whose sign is the mask of the ReLU."""

    @staticmethod
    def forward(ctx: Any, passes: LinearReluPasses, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
        y_BN = passes.forward(x_BK, weight_NK, bias_N)
        ctx.save_for_backward(x_BK, weight_NK, y_BN)
        ctx.passes, ctx.bias_dtype = passes, bias_N.dtype
        return y_BN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_BK, weight_NK, y_BN = ctx.saved_tensors
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        dz_BN, d_bias_N = ctx.passes.masked(gradients[0], y_BN)
        dx_BK = dz_BN @ weight_NK if needs_x else None
        d_weight_NK = dz_BN.t() @ x_BK if needs_weight else None
        return None, dx_BK, d_weight_NK, d_bias_N.to(ctx.bias_dtype)


def forward_reference(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return ``relu(x weight^T + bias)``, (B, N)."""
    return torch.addmm(bias_N, x_BK, weight_NK.t()).relu_()


def masked_reference(dy_BN: Tensor, y_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return dy where y > 0, else 0: the gradient before the ReLU, (B, N); and its column sums, at least fp32."""
    dz_BN = torch.where(y_BN > 0, dy_BN, 0.0)
    return dz_BN, dz_BN.sum(0, dtype=torch.float64 if dz_BN.dtype == torch.float64 else torch.float32)


PASSES = LinearReluPasses(forward_reference, masked_reference)


def linear_relu_reference(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return ``relu(x weight^T + bias)``, (B, N), contiguous. All tensors have one dtype.

    Args:
        x_BK: inputs; the stride between rows is arbitrary.
    """
    return apply(PASSES, x_BK, weight_NK, bias_N)


def apply(passes: LinearReluPasses, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """Return ``relu(x weight^T + bias)``, (B, N), with autograd around ``passes``."""
    y_BN: Tensor = LinearRelu.apply(passes, x_BK, weight_NK, bias_N)
    return y_BN


LINEAR_RELU = Operation(
    "linear_relu",
    linear_relu_reference,
    {
        "fused": triton_kernels("common.ops.linear_relu.triton:linear_relu"),
    },
    kernel_names=(("gradient of ReLU", r"^relu_gradient_"),),
    cases="common.ops.linear_relu.cases",
)
"""Signature: ``linear_relu(x_BK, weight_NK, bias_N)``. In ``fused``, cuBLASLt computes the products, forward with an
epilogue, and Triton the gradient in front of the ReLU."""
