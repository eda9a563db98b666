"""The upsampling convolution in every form against the definition in float64, borders and all gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from upsample_convolution_oracle import expected, inputs

from common.errors import UnsupportedImplementation
from common.nn.choice import choose
from common.nn.upsample_convolution import UpsampleConvolution
from common.ops.operation import AUTO, OperationRequest
from common.ops.upsample_convolution import UPSAMPLE_CONVOLUTION
from tests.capturable import Capturable

NAMES = pytest.mark.parametrize("name", ["transposed_library", "reference"])
SIZES = pytest.mark.parametrize(
    "sizes", [(2, 3, 5, 4, 4), (1, 4, 2, 3, 5), (2, 2, 2, 1, 1), (1, 1, 3, 1, 4)], ids=["square", "odd", "one", "row"]
)


def run(name: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
    y = UPSAMPLE_CONVOLUTION.function(name)(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@NAMES
@SIZES
def test_result_and_gradients_are_the_definitions(name: str, sizes: tuple[int, ...]) -> None:
    given = inputs(*sizes, torch.float64)
    for value, formula in zip(run(name, *given), expected(*given), strict=True):
        torch.testing.assert_close(value, formula, rtol=1e-12, atol=1e-12)


@NAMES
def test_there_may_be_no_bias(name: str) -> None:
    x, weight, bias, dy = inputs(2, 3, 5, 4, 4, torch.float64)
    leaves = [value.requires_grad_() for value in (x, weight)]
    y = UPSAMPLE_CONVOLUTION.function(name)(*leaves, None)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for value, formula in zip(found, expected(x, weight, torch.zeros_like(bias), dy), strict=False):
        torch.testing.assert_close(value, formula, rtol=1e-12, atol=1e-12)


@NAMES
def test_half_precision_rounds_once_a_weight(name: str) -> None:
    given = inputs(2, 16, 8, 4, 5, torch.bfloat16)
    for value, formula in zip(run(name, *given), expected(*given), strict=True):
        assert value.dtype == torch.bfloat16
        assert (value.double() - formula).norm() < 8e-3 * formula.norm()


@NAMES
def test_channels_last_stays(name: str) -> None:
    y, dx, *_ = run(name, *inputs(2, 4, 6, 3, 3, torch.float32))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)


@NAMES
def test_both_directions_are_capturable(name: str) -> None:
    given = inputs(1, 2, 2, 3, 3, torch.float32)
    with Capturable():
        run(name, *given)


def test_the_layer_is_a_convolution_behind_an_upsampling() -> None:
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


def test_the_kernels_are_asked_for_by_name_where_they_cannot_run() -> None:
    request = OperationRequest(torch.device("cpu"), torch.bfloat16, {"channels": 64})
    with pytest.raises(UnsupportedImplementation, match="needs a GPU"):
        UPSAMPLE_CONVOLUTION.select("transposed", request)
