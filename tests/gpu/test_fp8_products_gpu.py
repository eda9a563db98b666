"""FP8 on a GPU: casts against the definition byte by byte, products against float64, capture, and no waiting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from common.ops.fp8_cast import triton as fp8_cast_triton
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Scaling, cast_reference
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, Fp8Product
from tests import fp8_oracle as oracle

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

CASTS = pytest.mark.parametrize("cast", [fp8_cast_triton.cast, cast_reference], ids=["triton", "reference"])
FORMATS = pytest.mark.parametrize("to", [E4M3, E5M2], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.full((), scale, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda"))


def wide_range(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers from far below to above what a format holds, with all kinds of mantissas."""
    generator = torch.Generator().manual_seed(rows)
    exponent = torch.randint(-20, 17, (rows, columns), generator=generator).float()
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(exponent)
    return x.clamp(-6e4, 6e4).to(dtype)


def check(found: Fp8Tensor, x: Tensor, scale: float, to: torch.dtype) -> None:
    expected = oracle.encode(x.float().cpu().numpy() * np.float32(scale), to)
    np.testing.assert_array_equal(found.data.view(torch.uint8).cpu().numpy(), expected)
    assert found.transposed is not None
    np.testing.assert_array_equal(found.transposed.view(torch.uint8).cpu().numpy(), expected.T)
    assert found.scale_inverse.item() == np.float32(1) / np.float32(scale)


@CASTS
@FORMATS
@DTYPES
@pytest.mark.parametrize("shape", [(16, 16), (4112, 1040)])
def test_casts_equal_the_definition(cast, shape, dtype, to) -> None:
    x, state = wide_range(*shape, dtype), scaling(1.7)
    found = cast(x.cuda(), state, to, True)
    check(found, x, 1.7, to)
    assert state.scale.item() == oracle.scale_of(x.float().abs().max().item(), to)
    assert not state.pending.any()


@CASTS
@FORMATS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan_and_leaves_the_scale(cast, value, to) -> None:
    x, state = wide_range(1040, 528, torch.bfloat16), scaling(3.0)
    x[1030, 500] = value
    check(cast(x.cuda(), state, to, True), x, 3.0, to)
    assert state.scale.item() == 3.0


@pytest.mark.parametrize("value", [0.0, 2e-40])
def test_the_smallest_numbers(value) -> None:
    x, ours, plain = torch.full((64, 64), value, dtype=torch.bfloat16, device="cuda"), scaling(), scaling()
    found = fp8_cast_triton.cast(x, ours, E4M3, True)
    expected = cast_reference(x, plain, E4M3, True)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(ours.scale, plain.scale)


def test_many_uses_in_a_row_each_take_the_scale_of_the_one_before() -> None:
    """A program that replaced the scale before another one had read it would show as wrong bytes."""
    inputs = [torch.randn(8192, 1024, device="cuda").mul(2.0**i).to(torch.bfloat16) for i in range(4)]
    scales = [float(oracle.scale_of(x.float().abs().max().item(), E4M3)) for x in inputs]
    state = scaling(scales[3])
    casts = [fp8_cast_triton.cast(inputs[use % 4], state, E4M3, False) for use in range(100)]
    expected = [cast_reference(inputs[i], scaling(scales[i - 1]), E4M3, False) for i in range(4)]
    for use, found in enumerate(casts):
        assert torch.equal(found.scale_inverse, expected[use % 4].scale_inverse)
        assert torch.equal(found.data.view(torch.uint8), expected[use % 4].data.view(torch.uint8))


class Problem:
    """One layer with operands on the GPU."""

    def __init__(self, tokens: int, columns: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weight = torch.randn(rows, columns, device="cuda").mul(0.02).to(dtype).requires_grad_()
        self.bias = torch.randn(rows, device="cuda").to(dtype).requires_grad_()
        self.x = torch.randn(tokens, columns, device="cuda").to(dtype).requires_grad_()
        self.dy = torch.randn(tokens, rows, device="cuda").mul(1e-3).to(dtype)
        self.product = Fp8Product(self.weight)

    def step(self) -> list[Tensor]:
        """The result, and the gradients of x, weight and bias."""
        y = self.product(self.x, self.weight, self.bias)
        return [y, *torch.autograd.grad(y, (self.x, self.weight, self.bias), self.dy)]


@DTYPES
@pytest.mark.parametrize("sizes", [(512, 1024, 3072), (1024, 4096, 1024), (48, 64, 32)])
def test_products_equal_float64_products_of_quantised_operands(sizes, dtype) -> None:
    problem = Problem(*sizes, dtype)
    problem.step()
    scales = problem.product.scales.tolist()  # of these very tensors, so the next use takes them again
    found = problem.step()
    x = oracle.quantised(problem.x.cpu(), np.float32(scales[INPUT]), E4M3)
    weight = oracle.quantised(problem.weight.cpu(), np.float32(scales[WEIGHT]), E4M3)
    dy = oracle.quantised(problem.dy.cpu(), np.float32(scales[GRADIENT]), E5M2)
    bias = problem.bias.detach().double().cpu().numpy()
    expected = (x @ weight.T + bias, dy @ weight, dy.T @ x, problem.dy.double().cpu().numpy().sum(0))
    for index, (value, reference) in enumerate(zip(found, expected, strict=True)):
        assert value.dtype == dtype
        error = np.linalg.norm(value.detach().double().cpu().numpy() - reference) / np.linalg.norm(reference)
        assert error < 5e-3, f"tensor {index}: relative error {error:.2e}"


def test_a_detached_bias_is_added_but_not_differentiated() -> None:
    problem = Problem(512, 256, 384)
    problem.step()
    y, dx, dw, _ = problem.step()
    detached = problem.product(problem.x, problem.weight, problem.bias.detach())
    found = torch.autograd.grad(detached, (problem.x, problem.weight, problem.bias), problem.dy, allow_unused=True)
    assert found[2] is None
    for value, expected in zip((detached, *found[:2]), (y, dx, dw), strict=True):
        assert torch.equal(value, expected)


def test_a_gradient_that_is_not_finite_arrives() -> None:
    problem = Problem(512, 256, 128)
    problem.dy[100, 7] = math.inf
    _, dx, dw, _ = problem.step()
    assert not dx[100].isfinite().any()
    assert not dw[7].isfinite().any()
    assert dx[101].isfinite().all()


def test_captured_equals_eager_use_by_use() -> None:
    torch.manual_seed(0)
    eager = Problem(512, 256, 384)
    torch.manual_seed(0)
    captured = Problem(512, 256, 384)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()  # compiles
        captured.product.scales.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    for use in range(3):
        factor = 2.0**use
        with torch.no_grad():
            for problem in (eager, captured):
                problem.x.mul_(factor)
        expected = eager.step()
        graph.replay()
        for value, reference in zip(found, expected, strict=True):
            assert torch.equal(value, reference)
        assert torch.equal(captured.product.scales, eager.product.scales)


def test_nothing_waits_for_the_device() -> None:
    problem = Problem(512, 256, 128)
    problem.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
