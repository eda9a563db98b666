"""FP8 on a GPU: casts that follow one another, products against float64, and capture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from common.ops.fp8_cast import triton as fp8_cast_triton
from common.ops.fp8_cast.reference import E4M3, E5M2, Scaling, cast_reference
from common.ops.linear.fp8 import GRADIENT, INPUT, WEIGHT, Fp8LinearProduct
from tests import fp8_oracle as oracle
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8 units", allow_module_level=True)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.full((), scale, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda"))


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
        self.product = Fp8LinearProduct(self.weight)

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


def test_captured_equals_eager_use_by_use() -> None:
    torch.manual_seed(0)
    eager = Problem(512, 256, 384)
    torch.manual_seed(0)
    replayed = Problem(512, 256, 384)
    graph, found = captured(replayed.step)
    replayed.product.scales.zero_()
    for use in range(3):
        factor = 2.0**use
        with torch.no_grad():
            for problem in (eager, replayed):
                problem.x.mul_(factor)
        expected = eager.step()
        graph.replay()
        for value, reference in zip(found, expected, strict=True):
            assert torch.equal(value, reference)
        assert torch.equal(replayed.product.scales, eager.product.scales)
