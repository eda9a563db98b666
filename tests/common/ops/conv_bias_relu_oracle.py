"""Shapes of convolutions for tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


def inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Made-up values of magnitude one."""
    random = torch.Generator().manual_seed(case.channels_out * case.height)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=random).to(dtype)
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values

    fan_in = case.channels_in // case.groups * case.kernel**2
    height, width = ((size + 2 * case.padding - case.kernel) // case.stride + 1 for size in (case.height, case.width))
    y_shape = (case.pictures, case.channels_out, height, width)
    x = normal(case.pictures, case.channels_in, case.height, case.width)
    weight = normal(case.channels_out, case.channels_in // case.groups, case.kernel, case.kernel) / fan_in**0.5
    return Inputs(x, weight, normal(case.channels_out), normal(*y_shape), normal(*y_shape))
