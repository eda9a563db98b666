"""The first convolution, of few input channels, with bias, LeakyReLU and a 2x2x2 max-pool.

The volume before the pool is the largest tensor of the network: 32 channels at full resolution. The kernels compute the
eight voxels of a window one after the other and keep the largest, so this volume is never in memory, neither in the
forward pass nor its gradient in the backward pass. There is no input gradient.
Shapes and codes: as in :mod:`benchmarks.cosmoflow.ops.conv_leaky_pool`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.cosmoflow.ops.conv_leaky_pool import backward_reference, forward_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels


class FirstConvolutionPasses(NamedTuple):
    """The functions of an implementation, without autograd.

    Attributes:
        forward: maps (x_NCDHW, weight (C, C in, 3, 3, 3), bias_C, slope) to the result, the codes (int8) of its voxels,
            and the input as the backward pass wants it.
        backward: maps (the gradient of the result, codes, input, slope) to the gradients of the weight, in the dtype of
            the input, and of the bias, at least fp32.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _forward_reference(x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    return *forward_reference(F.conv3d(x_NCDHW, weight, padding=1), bias_C, slope), x_NCDHW


def _backward_reference(dy: Tensor, code: Tensor, x_NCDHW: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    dz, d_bias_C = backward_reference(dy, code, slope)
    weight = x_NCDHW.new_empty((dy.shape[1], x_NCDHW.shape[1], 3, 3, 3)).to(memory_format=torch.channels_last_3d)
    _, d_weight, _ = torch.ops.aten.convolution_backward(
        dz, x_NCDHW, weight, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [False, True, False]
    )
    return d_weight, d_bias_C


class _FirstConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: FirstConvolutionPasses, x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, slope: float
    ) -> Tensor:
        y, code, source = passes.forward(x_NCDHW, weight, bias_C, slope)
        ctx.save_for_backward(code, source)
        ctx.passes, ctx.slope, ctx.dtypes = passes, slope, (weight.dtype, bias_C.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_weight, d_bias_C = ctx.passes.backward(gradients[0], *ctx.saved_tensors, ctx.slope)
        return None, None, d_weight.to(ctx.dtypes[0]), d_bias_C.to(ctx.dtypes[1]), None


def first_convolution(
    passes: FirstConvolutionPasses, x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, slope: float
) -> Tensor:
    """Return ``max_pool(leaky_relu(conv(x) + bias))``, (N, C, D/2, H/2, W/2), with autograd around ``passes``.

    The kernel has 3x3x3 voxels, with one voxel of padding. ``x`` gets no gradient.

    Args:
        weight: (C, C in, 3, 3, 3).
        slope: factor on negative values, positive.

    Raises:
        ValueError: an edge of the volume is odd.
    """
    y: Tensor = _FirstConvolution.apply(passes, x_NCDHW.detach(), weight, bias_C, slope)
    return y


FIRST_CONVOLUTION = Operation(
    "first_convolution",
    FirstConvolutionPasses(_forward_reference, _backward_reference),
    {"triton": triton_kernels("benchmarks.cosmoflow.ops.first_convolution.triton", most={"inputs": 4})},
    kernel_names=(("first convolution", r"^first_convolution_"),),
    cases="benchmarks.cosmoflow.ops.first_convolution.cases",
)
"""Implementations of :class:`FirstConvolutionPasses`.

Sizes of a request: ``inputs``, the input channels. The reference is the library's convolution and the passes of
:mod:`benchmarks.cosmoflow.ops.conv_leaky_pool`.
"""
