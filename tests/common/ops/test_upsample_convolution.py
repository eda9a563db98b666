"""Test the upsampling convolution against the definition in float64, including borders and all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.nn.choice import choose
from common.nn.convolution import UpsampleConvolution
from common.ops.operation import AUTO
from common.ops.upsample_convolution import UPSAMPLE_CONVOLUTION
from tests.capturable import Capturable

NAMES = pytest.mark.parametrize("name", ["transposed_library", "reference"])


def inputs(pictures: int, channels: int, filters: int, height: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return x, weight, bias, and the gradient of the result; x and the gradient are in channels_last."""
    random = torch.Generator().manual_seed(channels)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    x, dy = (
        normal(*shape).contiguous(memory_format=torch.channels_last)
        for shape in ((pictures, channels, height, width), (pictures, filters, 2 * height, 2 * width))
    )
    weight = normal(filters, channels, 3, 3) / (9 * channels) ** 0.5
    return [x, weight, normal(filters), dy]


def expected(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """Return result and gradients in float64, from nine shifted copies of a picture whose pixels were repeated."""
    leaves = [value.detach().double().requires_grad_() for value in (x, weight, bias)]
    x, weight, bias = leaves
    height, width = (2 * size for size in x.shape[2:])
    repeated = F.pad(x.repeat_interleave(2, 2).repeat_interleave(2, 3), (1, 1, 1, 1))
    y = bias.view(1, -1, 1, 1)
    for row in range(3):
        for column in range(3):
            shifted = repeated[:, :, row : row + height, column : column + width]
            y = y + torch.einsum("oi,nihw->nohw", weight[:, :, row, column], shifted)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def run(name: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
    y = UPSAMPLE_CONVOLUTION.function(name)(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    "sizes", [(2, 3, 5, 4, 4), (1, 4, 2, 3, 5), (2, 2, 2, 1, 1), (1, 1, 3, 1, 4)], ids=["square", "odd", "one", "row"]
)
def test_result_and_gradients_are_the_definitions(sizes):
    given = inputs(*sizes, torch.float64)
    for value, formula in zip(run("reference", *given), expected(*given), strict=True):
        torch.testing.assert_close(value, formula, rtol=1e-12, atol=1e-12)


def test_half_precision_rounds_once_a_weight():
    given = inputs(2, 16, 8, 4, 5, torch.bfloat16)
    for value, formula in zip(run("reference", *given), expected(*given), strict=True):
        assert value.dtype == torch.bfloat16
        assert (value.double() - formula).norm() < 8e-3 * formula.norm()


@NAMES
def test_channels_last_stays(name):
    y, dx, *_ = run(name, *inputs(2, 4, 6, 3, 3, torch.float32))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)


@NAMES
def test_both_directions_are_capturable(name):
    given = inputs(1, 2, 2, 3, 3, torch.float32)
    with Capturable():
        run(name, *given)


def test_the_layer_is_a_convolution_behind_an_upsampling():
    torch.manual_seed(0)
    layer, twin = UpsampleConvolution(4).double(), torch.nn.Conv2d(4, 4, 3, padding=1).double()
    assert {name: value.shape for name, value in layer.state_dict().items()} == {
        "weight": (4, 4, 3, 3),
        "bias": (4,),
    }
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    assert choose(torch.nn.Sequential(layer), UpsampleConvolution, AUTO, torch.float64) == "transposed_library"
    torch.testing.assert_close(layer(x), twin(torch.nn.UpsamplingNearest2d(scale_factor=2)(x)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x, biased=False) + layer.bias[:, None, None], layer(x), rtol=1e-12, atol=1e-12)
    assert "implementation=transposed_library" in repr(layer)
