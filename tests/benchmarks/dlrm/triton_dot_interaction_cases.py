"""Triton's dot interaction against loops over pairs in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
from dot_interaction_oracle import expected, inputs

from benchmarks.dlrm.ops import dot_interaction
from benchmarks.dlrm.ops.dot_interaction import triton
from common.ops.operation import AUTO, OperationRequest
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("samples", "vectors", "width", "columns"),
    [(5, 27, 128, 480), (4, 27, 128, 479), (3, 5, 20, 40), (1, 1, 16, 16)],
    ids=["padded", "exact", "small", "no pairs"],
)
def test_result_and_gradient_are_those_of_the_loops(
    samples: int, vectors: int, width: int, columns: int, dtype: torch.dtype
) -> None:
    x, dy = inputs(samples, vectors, width, columns, dtype)
    y = triton.dot_interaction(x.requires_grad_(), columns)
    assert torch.equal(y[:, :width], x[:, 0])
    for value, formula in zip([y.detach(), *torch.autograd.grad(y, x, dy)], expected(x, dy), strict=True):
        assert value.dtype == dtype
        assert torch.equal(value.isnan(), formula.isnan())
        error = (value.double() - formula).norm() / formula.norm()
        assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def test_auto_takes_it_and_both_directions_are_capturable() -> None:
    chosen = dot_interaction.DOT_INTERACTION.select(AUTO, OperationRequest(torch.device("cpu"), torch.float16))
    assert chosen.name == "triton"
    x, dy = inputs(2, 5, 16, 32, torch.float32)
    with Capturable():
        torch.autograd.grad(chosen.function(x.requires_grad_(), 32), x, dy.t().contiguous().t())


def test_no_samples_and_other_memory() -> None:
    assert triton.dot_interaction(torch.zeros(0, 5, 16), 32).shape == (0, 32)
    with pytest.raises(ValueError, match="x must be contiguous"):
        triton.dot_interaction(torch.zeros(2, 16, 5).transpose(1, 2), 32)
