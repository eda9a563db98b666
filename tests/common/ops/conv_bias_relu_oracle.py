"""Convolutions to check, and the convolution, its epilogue and its gradients in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Case(NamedTuple):
    """Sizes of a convolution."""

    pictures: int
    channels_in: int
    channels_out: int
    height: int
    width: int
    kernel: int
    stride: int
    padding: int
    groups: int


class Inputs(NamedTuple):
    """Its tensors, channels_last, and the gradient of its result."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    dy: Tensor


SHAPES = [
    Case(2, 8, 24, 5, 7, 3, 1, 1, 1),
    Case(3, 16, 8, 6, 6, 1, 1, 0, 1),
    Case(2, 16, 16, 7, 5, 3, 2, 1, 4),
    Case(1, 8, 40, 9, 8, 1, 2, 0, 1),
]


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Made-up values of magnitude one."""
    random = torch.Generator(device).manual_seed(case.channels_out * case.height)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=random, device=device).to(dtype)
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values

    fan_in = case.channels_in // case.groups * case.kernel**2
    height, width = ((size + 2 * case.padding - case.kernel) // case.stride + 1 for size in (case.height, case.width))
    y_shape = (case.pictures, case.channels_out, height, width)
    x = normal(case.pictures, case.channels_in, case.height, case.width)
    weight = normal(case.channels_out, case.channels_in // case.groups, case.kernel, case.kernel) / fan_in**0.5
    return Inputs(x, weight, normal(case.channels_out), normal(*y_shape), normal(*y_shape))


def before_relu(case: Case, given: Inputs, added: bool) -> Tensor:
    """Of the values that the dtype holds, in float64."""
    y = F.conv2d(
        given.x.double(), given.weight.double(), given.bias.double(), case.stride, case.padding, groups=case.groups
    )
    return y + given.residual.double() if added else y


def expected(case: Case, given: Inputs, relu: bool, added: bool, mask: Tensor | None = None) -> list[Tensor]:
    """Result, and gradients of x, weight, bias and, if it is added, residual.

    Args:
        case, given: the convolution.
        relu, added: what follows it.
        mask: where the gradient passes the ReLU; where the result is positive unless it is given.
    """
    z = before_relu(case, given, added)
    mask = (z > 0 if mask is None else mask) if relu else torch.ones_like(z, dtype=torch.bool)
    dz = given.dy.double() * mask
    dx, d_weight, d_bias = torch.ops.aten.convolution_backward(
        dz, given.x.double(), given.weight.double(), [case.channels_out], [case.stride] * 2, [case.padding] * 2, [1, 1],
        False, [0, 0], case.groups, [True] * 3,
    )  # fmt: skip
    return [z.relu() if relu else z, dx, d_weight, d_bias, *([dz] if added else [])]
