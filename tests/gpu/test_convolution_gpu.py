"""Test convolutions with moments on a GPU, which cases lack because measurements select them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops import convolution as ops
from common.ops.cases import Draw
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.operation import AUTO, OperationRequest
from tests.gpu.support import GPU, captured, relative_error, replay_over_nan

pytestmark = pytest.mark.gpu

SHAPES = ((16, 64, 256, 56, 1, 1), (9, 64, 64, 27, 3, 1), (6, 256, 512, 28, 1, 2), (5, 128, 128, 29, 3, 2))
"""Pictures, input channels, output channels, height and width, kernel size, stride."""


@pytest.fixture
def cudnn_frontend() -> None:
    request = OperationRequest(GPU, torch.float16, {"channels": 64})
    if reason := ops.CONVOLUTION.unsupported("cudnn", request):
        pytest.skip(reason)


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, int, int]:
    """Return x, weight, stride and padding."""
    pictures, channels, filters, size, kernel, stride = shape
    draw = Draw(GPU, torch.float16)
    x = draw.normal(pictures, channels, size, size) + 0.5
    weight = draw.normal(filters, channels, kernel, kernel, scale=(channels * kernel**2) ** -0.5)
    last = torch.channels_last
    return (
        x.to(memory_format=last).requires_grad_(),
        weight.to(memory_format=last).requires_grad_(),
        stride,
        kernel // 2,
    )


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, cudnn_frontend: None) -> None:
    """Use cuDNN's plan for every shape, whether it is faster or not."""
    from common.ops.convolution import cudnn

    def plan(x: Tensor, weight: Tensor, stride: int, padding: int) -> cudnn.ConvolutionPlan:
        made = cudnn.ConvolutionPlan(x, weight, stride, padding)
        made.tune(x, weight)
        return made

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(cudnn, "_choose", plan)
    monkeypatch.setattr(cudnn, "_PLANS", {})


@pytest.mark.parametrize("shape", SHAPES)
def test_results_moments_and_gradients_equal_float64(shape: tuple[int, ...], fused: None) -> None:
    x, weight, stride, padding = inputs(shape)
    y, moments = ops.CONVOLUTION.function("cudnn")(x, weight, stride, padding)
    exact = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
    assert relative_error(y, exact) < 1e-3
    for found, expected in zip(moments, (exact.sum((0, 2, 3)), exact.square().sum((0, 2, 3))), strict=True):
        assert found.shape == (1, len(weight))
        assert relative_error(found[0], expected) < 1e-3
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, weight], dy), torch.autograd.grad(exact, [x, weight], dy.double())
    for found, expected in zip(*gradients, strict=True):
        assert relative_error(found, expected) < 2e-3


def test_captured_moments_follow_the_input(fused: None) -> None:
    x, weight, stride, padding = inputs(SHAPES[0])

    def step() -> list[Tensor]:
        y, moments = ops.CONVOLUTION.function("cudnn")(x, weight, stride, padding)
        return [y.detach(), moments]

    graph, results = captured(step)
    x.detach().normal_()
    replay_over_nan(graph, results)
    expected_y, expected = step()
    assert torch.equal(results[0], expected_y)
    # the order of cuDNN's atomic sums varies
    torch.testing.assert_close(results[1], expected, rtol=1e-5, atol=1e-1)


def test_shapes_first_met_in_a_capture_and_deterministic_runs_use_pytorch(
    monkeypatch: pytest.MonkeyPatch, cudnn_frontend: None
) -> None:
    from common.ops.convolution import cudnn

    x, weight, stride, padding = inputs(SHAPES[1])
    monkeypatch.setattr(cudnn, "_PLANS", {})
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert cudnn.convolution(x, weight, stride, padding)[1] is None
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert cudnn.convolution(x, weight, stride, padding)[1] is None
    assert not cudnn._PLANS


def test_cudnn_is_chosen_for_half_and_the_reference_for_fp32() -> None:
    sizes = {"channels": 256, "filters": 256, "kernel": 3, "stride": 1, "groups": 1}
    for dtype, name in ((torch.float16, "cudnn"), (torch.bfloat16, "cudnn"), (torch.float32, "reference")):
        assert CONV_BIAS_RELU.select(AUTO, OperationRequest(GPU, dtype, sizes)).name == name
