"""Test the folded gradient of a weight against the whole convolution in float64, and the layers that are not folded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops import local_convolution
from common.ops.local_convolution import LOCAL_CONVOLUTION
from common.ops.operation import AUTO, OperationRequest

CPU = torch.device("cpu")
FOLDED = LOCAL_CONVOLUTION.function("folded")


def case(channels: int, filters: int, volume: tuple[int, int, int], stride: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the result, the input, and the weight."""
    generator = torch.Generator().manual_seed(0)
    y = (2, filters, *((size - 1) // stride + 1 for size in volume))
    shapes = (y, (2, channels, *volume), (filters, channels, 3, 3, 3))
    dy, x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return dy, x, weight


def whole(dy: Tensor, x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight from autograd."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    dx, dweight = torch.autograd.grad(F.conv3d(x, weight, stride=stride, padding=1), (x, weight), dy)
    return dx, dweight


def assert_equal(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def refuse(*_: Tensor) -> Tensor:
    raise AssertionError("folded")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize(
    ("channels", "filters", "volume"),
    [(1, 1, (1, 1, 2)), (3, 5, (4, 3, 6)), (4, 32, (2, 3, 8)), (64, 32, (3, 2, 4)), (32, 7, (5, 5, 10))],
)
def test_the_folded_gradient_of_the_weight_is_that_of_the_whole(channels, filters, volume, memory_format):
    dy, x, weight = (tensor.contiguous(memory_format=memory_format) for tensor in case(channels, filters, volume))
    assert_equal(local_convolution.folded_weight_gradient(dy, x, weight), whole(dy, x, weight, 1)[1])


def test_narrow_layers_of_even_width_are_folded(monkeypatch):
    monkeypatch.setattr(local_convolution, "folded_weight_gradient", refuse)
    with pytest.raises(AssertionError, match="folded"):
        FOLDED.backward(*case(3, local_convolution.FOLDED_CHANNELS, (2, 3, 4)), 1, (True, True))


@pytest.mark.parametrize(
    ("filters", "width", "stride"), [(5, 7, 1), (33, 4, 1), (5, 4, 2)], ids=["odd width", "wide", "stride"]
)
def test_other_layers_are_not_folded(filters, width, stride, monkeypatch):
    monkeypatch.setattr(local_convolution, "folded_weight_gradient", refuse)
    dy, x, weight = case(3, filters, (4, 2, width), stride)
    found = FOLDED.backward(dy, x, weight, stride, (True, True))
    for gradient, expected in zip(found, whole(dy, x, weight, stride), strict=True):
        assert_equal(gradient, expected)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "input", "weight"])
def test_only_needed_gradients_are_computed(needs):
    dy, x, weight = case(3, 5, (4, 2, 6))
    found = FOLDED.backward(dy, x, weight, 1, needs)
    for gradient, needed, expected in zip(found, needs, whole(dy, x, weight, 1), strict=True):
        if needed:
            assert_equal(gradient, expected)
        else:
            assert gradient is None


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "folded"), (torch.float16, "folded"), (torch.float32, "reference")]
)
def test_auto_folds_half_precision_on_a_gpu(dtype, name):
    request = OperationRequest(torch.device("cuda"), dtype, {"channels": 32})
    assert LOCAL_CONVOLUTION.select(AUTO, request).name == name
