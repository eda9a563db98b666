"""The Triton batch norm on a GPU: half precision against float64, capture, and no unwritten output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import batch_norm as ops
from common.ops.batch_norm.reference import Norm, batch_norm_reference

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 3e-3}
# fp32 against fp64 may disagree on the sign of single elements, hence on their gradients
SHAPES = ((16, 64, 56, 56), (9, 128, 28, 27), (5, 24, 7, 5), (8, 2048, 7, 7))


def norm_of(channels: int, dtype: torch.dtype, seed: int) -> Norm:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (torch.randn(channels, generator=generator).cuda().to(dtype).requires_grad_() for _ in range(2))
    return Norm(weight, bias, torch.zeros_like(weight), torch.ones_like(weight))


def run(kind: str, x: Tensor, residual: Tensor, name: str) -> list[Tensor]:
    """Forward and backward of one operation: results, gradients and running statistics, in float64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    first, second = norm_of(x.shape[1], wide, 0), norm_of(x.shape[1], wide, 1)
    outputs: tuple[Tensor, ...]
    if kind == "pool":
        outputs = (ops.BATCH_NORM_RELU_MAX_POOL.function(name)(x, first),)
    elif kind in ("add", "dual"):
        projection = second if kind == "dual" else None
        outputs = ops.BATCH_NORM_ADD_RELU.function(name)(x, first, residual, projection)
    else:
        outputs = (ops.BATCH_NORM.function(name)(x, first, relu=kind == "relu"),)
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(y.shape, generator=generator).bfloat16().cuda().to(x.dtype) for y in outputs]
    torch.autograd.backward(outputs, [g.contiguous(memory_format=torch.channels_last) for g in gradients])
    leaves = [x, first.weight, first.bias]
    if kind in ("add", "dual"):
        leaves.append(residual)
    if kind == "dual":
        leaves += [second.weight, second.bias]
    found = [outputs[0].detach(), first.running_mean, first.running_var, second.running_mean, second.running_var]
    for leaf in leaves:
        assert leaf.grad is not None
        found.append(leaf.grad)
    return [value.double() for value in found]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["plain", "relu", "add", "dual", "pool"])
def test_triton_equals_float64(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).mul(2).add(3).to(dtype).cuda() for _ in range(2))
    poison = torch.full((64, 1 << 20), float("nan"), device="cuda")
    del poison
    found = run(kind, *(t.contiguous(memory_format=torch.channels_last) for t in (x, residual)), "triton")
    expected = run(kind, x.double(), residual.double(), "reference")
    for index, (value, exact) in enumerate(zip(found, expected, strict=True)):
        error = (value - exact).norm() / exact.norm().clamp(min=1e-6)
        assert error < TOLERANCE[dtype], f"tensor {index}: relative error {error:.2e}"


def test_captured_equals_eager_and_replays_agree() -> None:
    x = torch.randn(8, 64, 28, 28, device="cuda").half().contiguous(memory_format=torch.channels_last).requires_grad_()
    residual = torch.randn_like(x, requires_grad=True)
    norm = norm_of(64, torch.float32, 0)
    inputs = (x, residual, norm.weight, norm.bias)

    def step() -> list[Tensor]:
        first, second = ops.BATCH_NORM_ADD_RELU.function("triton")(x, norm, residual)
        return [first, *torch.autograd.grad((first * 2 + second.square()).sum(), inputs)]

    with torch.cuda.stream(torch.cuda.Stream()):
        eager = [value.clone() for value in step()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = step()
        for _ in range(2):
            for value in captured:
                value.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            for value, reference in zip(captured, eager, strict=True):
                assert torch.equal(value, reference)


def test_mean_far_from_zero_keeps_its_variance() -> None:
    x = (torch.randn(32, 64, 14, 14, device="cuda") + 3000).contiguous(memory_format=torch.channels_last)
    norm = norm_of(64, torch.float32, 0)
    y = ops.BATCH_NORM.function("triton")(x, norm)
    expected = batch_norm_reference(x.double(), norm_of(64, torch.float64, 0))
    assert (y.double() - expected).norm() / expected.norm() < 2e-3
