"""Test convolutions on a GPU: in CUDA graphs, and with moments, which cases lack because measurements select them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops import convolution as ops
from common.ops.batch_norm import BATCH_NORM_ADD_RELU
from common.ops.batch_norm import cases as norm_cases
from common.ops.cases import Draw
from common.ops.conv_bias_relu import CONV_BIAS_RELU
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

GPU = torch.device("cuda")
UNSUPPORTED = ops.CONVOLUTION.unsupported("cudnn", OperationRequest(GPU, torch.float16, {"channels": 64}))
WITH_MOMENTS = pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED))
SHAPES = ((16, 64, 256, 56, 1, 1), (9, 64, 64, 27, 3, 1), (6, 256, 512, 28, 1, 2), (5, 128, 128, 29, 3, 2))
"""Pictures, input channels, output channels, height and width, kernel size, stride."""


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


def error(found: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the error, relative to the norm of the expected values."""
    return (found.double() - expected).norm() / expected.double().norm()


def captured(step: Callable[[], list[Tensor]], change: Callable[[], object]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each result of a captured step and of the eager step, both after ``change``. Nothing waits for the GPU."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            results = step()
        change()
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        eager = step()
        torch.cuda.synchronize()
    yield from zip(results, eager, strict=True)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use cuDNN's plan for every shape, whether it is faster or not."""
    from common.ops.convolution import cudnn

    def plan(x: Tensor, weight: Tensor, stride: int, padding: int) -> cudnn.Plan:
        made = cudnn.Plan(x, weight, stride, padding)
        made.tune(x, weight)
        return made

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(cudnn, "_choose", plan)
    monkeypatch.setattr(cudnn, "_PLANS", {})


@WITH_MOMENTS
@pytest.mark.parametrize("shape", SHAPES)
def test_results_moments_and_gradients_equal_float64(shape: tuple[int, ...], fused: None) -> None:
    x, weight, stride, padding = inputs(shape)
    y, moments = ops.CONVOLUTION.function("cudnn")(x, weight, stride, padding)
    exact = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
    assert error(y, exact) < 1e-3
    for found, expected in zip(moments, (exact.sum((0, 2, 3)), exact.square().sum((0, 2, 3))), strict=True):
        assert found.shape == (1, len(weight))
        assert error(found[0], expected) < 1e-3
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, weight], dy), torch.autograd.grad(exact, [x, weight], dy.double())
    for found, expected in zip(*gradients, strict=True):
        assert error(found, expected) < 2e-3


@WITH_MOMENTS
def test_captured_moments_follow_the_input(fused: None) -> None:
    x, weight, stride, padding = inputs(SHAPES[0])

    def step() -> list[Tensor]:
        y, moments = ops.CONVOLUTION.function("cudnn")(x, weight, stride, padding)
        return [y.detach(), moments]

    (y, expected_y), (moments, expected) = captured(step, x.detach().normal_)
    assert torch.equal(y, expected_y)
    torch.testing.assert_close(moments, expected, rtol=1e-5, atol=1e-1)  # cuDNN sums with atomics, so the order varies


@WITH_MOMENTS
def test_shapes_first_met_in_a_capture_and_deterministic_runs_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.ops.convolution import cudnn

    x, weight, stride, padding = inputs(SHAPES[1])
    monkeypatch.setattr(cudnn, "_PLANS", {})
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert cudnn.convolution(x, weight, stride, padding)[1] is None
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert cudnn.convolution(x, weight, stride, padding)[1] is None
    assert not cudnn._PLANS


def test_captured_batch_norm_equals_eager() -> None:
    shape = 8, 64, 28, 28
    draw, function = Draw(GPU, torch.float16), BATCH_NORM_ADD_RELU.function("triton")
    x, residual, dy, other_dy = (draw.normal(*shape).to(memory_format=torch.channels_last) for _ in range(4))
    norm = norm_cases.norm(draw, shape[1])
    leaves = [leaf.requires_grad_() for leaf in (x, residual, norm.weight, norm.bias)]

    def step() -> list[Tensor]:
        results = function(x, norm, residual)
        return [results[0].detach(), *torch.autograd.grad(results, leaves, [dy, other_dy])]

    for found, expected in captured(step, x.detach().normal_):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CONV_BIAS_RELU.names)
@pytest.mark.parametrize("groups", [1, 32])
def test_captured_convolutions_follow_the_input(groups: int, name: str) -> None:
    draw, function = Draw(GPU, torch.float16), CONV_BIAS_RELU.function(name)
    x, residual, dy = (draw.normal(2, 256, 25, 26).to(memory_format=torch.channels_last) for _ in range(3))
    weight = draw.normal(256, 256 // groups, 3, 3, scale=0.05).to(memory_format=torch.channels_last)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, draw.normal(256), residual)]

    def step() -> list[Tensor]:
        y = function(*leaves[:3], 1, 1, groups, True, residual)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    for found, expected in captured(step, x.detach().normal_):
        assert error(found, expected) < 2e-3


def test_cudnn_is_chosen_for_half_and_the_reference_for_the_rest() -> None:
    sizes = {"channels": 256, "filters": 256, "kernel": 3, "stride": 1, "groups": 1}
    for dtype, name in ((torch.float16, "cudnn"), (torch.bfloat16, "cudnn"), (torch.float32, "reference")):
        assert CONV_BIAS_RELU.select(AUTO, OperationRequest(GPU, dtype, sizes)).name == name
