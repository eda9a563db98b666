"""Convolution with moments on a GPU: half precision against float64, behind batch norm, captured, and repeatable."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops import batch_norm as batch_norm_ops
from common.ops import convolution as ops
from common.ops.batch_norm.reference import Norm
from common.ops.operation import OperationRequest

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
UNSUPPORTED = ops.CONVOLUTION.unsupported(
    "cudnn", OperationRequest(torch.device("cuda"), torch.float16, {"channels": 64})
)
if UNSUPPORTED:
    pytest.skip(UNSUPPORTED, allow_module_level=True)

from common.ops.convolution import cudnn as convolution_cudnn  # noqa: E402

SHAPES = ((16, 64, 256, 56, 1, 1), (9, 64, 64, 27, 3, 1), (6, 256, 512, 28, 1, 2), (5, 128, 128, 29, 3, 2))
"""Images, C in, C out, size, kernel, stride."""


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, int, int]:
    images, channels, filters, size, kernel, stride = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, channels, size, size, generator=generator) + 0.5
    weight = torch.randn(filters, channels, kernel, kernel, generator=generator) / (channels * kernel**2) ** 0.5
    last = torch.channels_last
    return x.half().cuda().to(memory_format=last), weight.half().cuda().to(memory_format=last), stride, kernel // 2


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use cuDNN's plan for every shape, whether it is faster or not."""

    def plan(x: Tensor, weight: Tensor, stride: int, padding: int) -> convolution_cudnn.Plan:
        made = convolution_cudnn.Plan(x, weight, stride, padding)
        made.tune(x, weight)
        return made

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(convolution_cudnn, "_choose", plan)
    monkeypatch.setattr(convolution_cudnn, "_PLANS", {})


def run(x: Tensor, weight: Tensor, stride: int, padding: int, names: tuple[str, str]) -> list[Tensor]:
    """Convolution, batch norm and ReLU: result, running statistics and gradients, in float64."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    ones = torch.ones(weight.shape[0], dtype=wide, device="cuda")
    norm = Norm((ones * 1.5).requires_grad_(), (ones / 4).requires_grad_(), ones * 0, ones.clone())
    y, moments = ops.CONVOLUTION.function(names[0])(x, weight, stride, padding)
    assert (moments is None) == (names[0] == "reference")
    z = batch_norm_ops.BATCH_NORM.function(names[1])(y, norm, relu=True, moments=moments)
    dz = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).half().cuda().to(z.dtype)
    z.backward(dz.contiguous(memory_format=torch.channels_last))
    found = [z.detach(), norm.running_mean, norm.running_var]
    for leaf in (x, weight, norm.weight, norm.bias):
        assert leaf.grad is not None
        found.append(leaf.grad)
    return [value.double() for value in found]


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_equal_float64(shape: tuple[int, ...], fused: None) -> None:
    x, weight, stride, padding = inputs(shape)
    y, moments = convolution_cudnn.convolution(x, weight, stride, padding)
    assert moments is not None
    exact = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
    assert (y.double() - exact).norm() / exact.norm() < 1e-3
    expected = torch.stack([exact.sum((0, 2, 3)), exact.square().sum((0, 2, 3))])[:, None]
    assert moments.shape == expected.shape
    assert ((moments - expected).norm(dim=2) / expected.norm(dim=2)).max() < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_convolution_and_batch_norm_equal_float64(shape: tuple[int, ...], fused: None) -> None:
    x, weight, stride, padding = inputs(shape)
    found = run(x, weight, stride, padding, ("cudnn", "triton"))
    expected = run(x.double(), weight.double(), stride, padding, ("reference", "reference"))
    unfused = run(x, weight, stride, padding, ("reference", "triton"))
    for index, (value, other, exact) in enumerate(zip(found, unfused, expected, strict=True)):
        error, usual = ((v - exact).norm() / exact.norm() for v in (value, other))
        assert error < max(2e-3, 1.2 * usual), f"tensor {index}: relative error {error:.2e}, unfused {usual:.2e}"


def test_captured_equals_eager_and_replays_agree(fused: None) -> None:
    x, weight, stride, padding = inputs(SHAPES[0])

    def convolve() -> list[Tensor]:
        y, moments = convolution_cudnn.convolution(x, weight, stride, padding)
        assert moments is not None
        return [y, moments]

    with torch.cuda.stream(torch.cuda.Stream()):
        eager = [value.clone() for value in convolve()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = convolve()
        for _ in range(3):
            for value in captured:
                value.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured[0], eager[0])
            # cuDNN sums the moments with atomics, in no fixed order.
            torch.testing.assert_close(captured[1], eager[1], rtol=1e-5, atol=1e-1)


def test_shapes_first_met_in_a_capture_and_deterministic_runs_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, stride, padding = inputs(SHAPES[1])
    monkeypatch.setattr(convolution_cudnn, "_PLANS", {})
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert convolution_cudnn.convolution(x, weight, stride, padding)[1] is None
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert convolution_cudnn.convolution(x, weight, stride, padding)[1] is None
    assert not convolution_cudnn._PLANS
