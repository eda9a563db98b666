"""Test the reference of a linear layer with ReLU against its formula."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.ops.linear_relu import linear_relu_reference


class Inputs(NamedTuple):
    """Tensors of a layer, and the gradient of its result."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor


def inputs(samples: int, columns: int, outputs: int, dtype: torch.dtype) -> Inputs:
    """Return random values of magnitude one."""
    random = torch.Generator().manual_seed(columns * outputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    weight = normal(outputs, columns) / columns**0.5
    values = (normal(samples, columns), weight, normal(outputs), normal(samples, outputs))
    return Inputs(*(value.to(dtype) for value in values))


def expected(given: Inputs) -> list[Tensor]:
    """Return result and gradients of x, weight and bias in float64."""
    x, weight, bias, dy = (value.double() for value in given)
    z = torch.einsum("bk,nk->bn", x, weight) + bias
    dz = dy * (z > 0)
    return [z.clamp(min=0), torch.einsum("bn,nk->bk", dz, weight), torch.einsum("bn,bk->nk", dz, x), dz.sum(0)]


def test_result_and_gradients_are_the_formulas():
    given = inputs(9, 13, 6, torch.float64)
    leaves = [value.requires_grad_() for value in given[:3]]
    y = linear_relu_reference(*leaves)
    assert 0.2 < (y > 0).double().mean() < 0.8
    for mine, formula in zip([y, *torch.autograd.grad(y, leaves, given.dy)], expected(given), strict=True):
        torch.testing.assert_close(mine, formula)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_sum_for_the_bias_is_in_fp32(dtype):
    """2,049 and 257 are the first whole numbers that fp16 and bf16 do not hold."""
    x, weight, bias = torch.ones(3000, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype), torch.ones(4, dtype=dtype)
    y = linear_relu_reference(x, weight, bias.requires_grad_())
    (found,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert torch.equal(found, torch.full((4,), 3000.0, dtype=dtype))


def test_only_input_weight_and_result_are_kept():
    given, kept = inputs(7, 4, 3, torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda none: None):
        linear_relu_reference(given.x, given.weight.requires_grad_(), given.bias.requires_grad_())
    assert kept == [(7, 4), (3, 4), (7, 3)]


def test_an_input_that_needs_no_gradient_gets_none():
    given = inputs(7, 4, 3, torch.float32)
    leaves = [given.weight.requires_grad_(), given.bias.requires_grad_()]
    y = linear_relu_reference(given.x, *leaves)
    called = []

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Called():
        torch.autograd.grad(y, leaves, given.dy)
    assert called.count("mm") == 1
