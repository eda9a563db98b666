"""Test properties of the Triton GEGLU, LayerNorm after addition, and bias gradient that cases cannot express.

tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops import bias_gradient
from common.ops.add_layer_norm import add_layer_norm_reference
from common.ops.add_layer_norm import triton as norm_triton
from common.ops.geglu import triton as geglu_triton
from common.ops.operation import AUTO, OperationRequest
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

SUMS = bias_gradient.BIAS_GRADIENT.function("triton")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_geglu_far_from_zero_is_the_product_or_nothing() -> None:
    x = torch.tensor([[3.0, 3.0, 3.0, 30.0, -30.0, 0.0]], requires_grad=True)
    y = geglu_triton.geglu(x, None)
    y.backward(torch.ones(1, 3))
    assert y.tolist() == [[90.0, 0.0, 0.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[30.0, 0.0, 0.0, 3.0, 0.0, 1.5]]


def test_norm_far_from_zero_keeps_its_variance() -> None:
    x, weight, bias = random(4, 256) + 1e3, random(256, seed=1), random(256, seed=2)
    _, normed = norm_triton.add_layer_norm(x, None, weight, bias, 1e-5)
    _, expected = add_layer_norm_reference(x.double(), None, weight.double(), bias.double(), 1e-5)
    assert (normed - expected).abs().max() < 1e-3


def test_norm_with_nothing_to_add_writes_no_sum_and_adds_both_gradients_in_its_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Tensor | None] = []
    original = norm_triton.backward

    def record(d_sum: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
        given.append(d_sum)
        return original(d_sum, *rest)

    monkeypatch.setattr(norm_triton, "backward", record)
    x, weight, bias = (value.requires_grad_() for value in (random(4, 32), random(32, seed=1), random(32, seed=2)))
    total, normed = norm_triton.add_layer_norm(x, None, weight, bias, 1e-5)
    assert total.data_ptr() == x.data_ptr()
    d_total = random(4, 32, seed=3)
    torch.autograd.backward([total, normed], [d_total, random(4, 32, seed=4)])
    assert len(given) == 1
    assert torch.equal(given[0], d_total)


def test_sums_of_rows_are_capturable() -> None:
    with Capturable():
        SUMS(random(9, 20)[:, :12], torch.float32)


def test_half_precision_sums_beyond_its_own_steps() -> None:
    """In fp16, 4,096 + 1 is rounded to 4,096."""
    assert SUMS(torch.ones(5000, 4, dtype=torch.float16), torch.float32).tolist() == [5000.0] * 4


def test_double_precision_is_left_to_pytorch() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float64, {})
    assert bias_gradient.BIAS_GRADIENT.select(AUTO, request).name == "reference"
