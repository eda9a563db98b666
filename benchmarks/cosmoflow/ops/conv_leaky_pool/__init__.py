"""Convolution with bias, LeakyReLU and a 2x2x2 max-pool, with a hand-written backward pass.

LeakyReLU and the bias do not change which voxel of a window is largest. So one pass over the convolution's result adds
the bias to the largest of eight voxels, applies LeakyReLU and writes an eighth of the volume. Backward needs only a
code of that voxel, one byte for each window: its corner in the window, and whether the slope applies.
Shapes: N samples, C channels of the result, D H W convolved volume; the result is (N, C, D/2, H/2, W/2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels, widen

BELOW = 8
"""Added to the corner (4 d + 2 h + w) of the largest voxel in a code where its sum with the bias is not positive."""


class PoolPasses(NamedTuple):
    """The functions of an implementation, without autograd.

    Attributes:
        forward: maps (z_NCDHW, bias_C, slope) to the result and the codes (int8) of its voxels.
        backward: maps (the gradient of the result, codes, slope) to the gradient of z, and to its sums (C,) over
            samples and voxels, at least fp32.
    """

    forward: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def forward_reference(z_NCDHW: Tensor, bias_C: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return ``max_pool(leaky_relu(z + bias))`` and the codes. The first of equal voxels counts as the largest.

    Raises:
        ValueError: an edge of the volume is odd.
    """
    check_edges(z_NCDHW)
    largest, index = F.max_pool3d(z_NCDHW, 2, return_indices=True)
    height, width = z_NCDHW.shape[3:]
    corner = (index // (height * width) & 1) * 4 + (index // width & 1) * 2 + (index & 1)
    y = widen(largest) + widen(bias_C).view(-1, 1, 1, 1)
    above = y > 0
    return torch.where(above, y, y * slope).to(z_NCDHW.dtype), torch.where(above, corner, corner + BELOW).to(torch.int8)


def backward_reference(dy: Tensor, code: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Return the gradient of z and its sums (C,); see :class:`PoolPasses`."""
    d = widen(dy)
    d = torch.where(code < BELOW, d, d * slope)
    N, C, D, H, W = dy.shape
    corner = torch.arange(BELOW, device=dy.device, dtype=code.dtype).view(2, 1, 2, 1, 2)
    chosen = (code & BELOW - 1).view(N, C, D, 1, H, 1, W, 1) == corner
    dz = torch.where(chosen, d.to(dy.dtype).view(N, C, D, 1, H, 1, W, 1), 0.0)
    return dz.reshape(N, C, 2 * D, 2 * H, 2 * W), d.sum((0, 2, 3, 4))


def check_edges(z_NCDHW: Tensor) -> None:
    """Check that windows of 2x2x2 voxels cover a volume.

    Raises:
        ValueError: an edge of the volume is odd.
    """
    if any(edge % 2 for edge in z_NCDHW.shape[2:]):
        raise ValueError(f"a volume of {tuple(z_NCDHW.shape[2:])} voxels has no whole windows of 2x2x2")


class _ConvLeakyPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: PoolPasses, x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, slope: float) -> Tensor:
        y, code = passes.forward(F.conv3d(x_NCDHW, weight, padding=1), bias_C, slope)
        ctx.save_for_backward(x_NCDHW, weight, code)
        ctx.passes, ctx.slope, ctx.bias_dtype = passes, slope, bias_C.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NCDHW, weight, code = ctx.saved_tensors
        dz_NCDHW, d_bias_C = ctx.passes.backward(gradients[0], code, ctx.slope)
        needs = [*ctx.needs_input_grad[1:3], False]
        dx_NCDHW, d_weight, _ = torch.ops.aten.convolution_backward(
            dz_NCDHW, x_NCDHW, weight, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, needs
        )
        return None, dx_NCDHW, d_weight, d_bias_C.to(ctx.bias_dtype), None


def conv_leaky_pool(passes: PoolPasses, x_NCDHW: Tensor, weight: Tensor, bias_C: Tensor, slope: float) -> Tensor:
    """Return ``max_pool(leaky_relu(conv(x) + bias))``, (N, C, D/2, H/2, W/2), with autograd around ``passes``.

    The convolution is the library's, with a kernel of 3x3x3 and one voxel of padding.

    Args:
        weight: (C, C in, 3, 3, 3).
        slope: factor on negative values, positive.

    Raises:
        ValueError: an edge of the volume is odd.
    """
    y: Tensor = _ConvLeakyPool.apply(passes, x_NCDHW, weight, bias_C, slope)
    return y


CONV_LEAKY_POOL = Operation(
    "conv_leaky_pool",
    PoolPasses(forward_reference, backward_reference),
    {"triton": triton_kernels("benchmarks.cosmoflow.ops.conv_leaky_pool.triton")},
    kernel_names=(("bias, LeakyReLU and max-pool", r"^leaky_pool_"),),
    cases="benchmarks.cosmoflow.ops.conv_leaky_pool.cases",
)
"""Implementations of :class:`PoolPasses`. On a GPU the reference writes every intermediate result to memory."""
