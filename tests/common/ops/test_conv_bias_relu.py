"""Test the reference of a convolution with bias, residual and ReLU against PyTorch's functions and autograd."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.conv_bias_relu import conv_bias_relu_reference


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
    """Tensors of a convolution in channels_last, and the gradient of its result."""

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
    """Return random values of magnitude one."""
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


def by_parts(x, weight, bias, stride, padding, groups, relu, residual=None):
    y = F.conv2d(x, weight, bias, stride, padding, groups=groups)
    y = y if residual is None else y + residual
    return y.relu() if relu else y


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_result_and_gradients_are_those_of_the_parts(shape, relu, added):
    case = inputs(shape, torch.float64)
    leaves = [value.requires_grad_() for value in (case.x, case.weight, case.bias, case.residual)]
    residual = leaves[3] if added else None
    leaves = leaves if added else leaves[:3]
    rest = (shape.stride, shape.padding, shape.groups, relu, residual)
    found = conv_bias_relu_reference(*leaves[:3], *rest)
    expected = by_parts(*leaves[:3], *rest)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, case.dy), torch.autograd.grad(expected, leaves, case.dy), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def kept(case, relu, *needed):
    """Return the shapes of the tensors saved for backward if the tensors ``needed`` require a gradient."""
    for name in needed:
        getattr(case, name).requires_grad_()
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    shape = SHAPES[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = conv_bias_relu_reference(
            case.x, case.weight, case.bias, shape.stride, shape.padding, 1, relu, case.residual
        )
    assert y.requires_grad == bool(needed)
    return shapes


def test_only_input_weight_and_result_are_kept_and_only_if_something_needs_them():
    def case():
        return inputs(SHAPES[0], torch.float32)

    x, weight, y = (tuple(value.shape) for value in (case().x, case().weight, case().dy))
    assert kept(case(), True) == []
    assert kept(case(), True, "x", "weight", "bias", "residual") == [x, weight, y]
    assert kept(case(), False, "x") == [x, weight]
    assert kept(case(), True, "bias", "residual") == [y]
    assert kept(case(), False, "bias") == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_for_the_bias_is_in_fp32(dtype):
    case = inputs(SHAPES[0], dtype)
    dy = torch.full_like(case.dy, 3.0)
    bias = case.bias.requires_grad_()
    y = conv_bias_relu_reference(case.x, case.weight, bias, 1, 1, 1, False)
    (found,) = torch.autograd.grad(y, bias, dy)
    assert found.dtype == dtype
    assert torch.equal(found, torch.full_like(found, 3.0 * dy[:, 0].numel()))
