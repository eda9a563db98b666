"""The gradient of a head's weight, whose chunks of tokens add up in fp32 where the main gradient is in fp32."""

import pytest
import torch

from tests.common.language.head_gradients import HEADS, Case

SMALL = Case(tokens=400, chunk=50, words=32, hidden=16, device=torch.device("cpu"))
AS_FP32, BEYOND_BF16 = 1e-6, 5e-4
"""Relative: within the one, sums are rounded as fp32 is; they are beyond the other where each chunk's product, or the
sum, is rounded to bf16."""


@pytest.mark.parametrize("head", list(HEADS))
def test_chunks_are_added_without_rounding_their_products(head):
    weight_VE = SMALL.zeros()
    assert SMALL.gradient_and_error(head, weight_VE, torch.float32)[1] < AS_FP32
    assert SMALL.gradient_and_error(head, weight_VE, torch.bfloat16)[1] > BEYOND_BF16


@pytest.mark.parametrize("head", list(HEADS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_follows_float64_and_is_handed_on_in_its_dtype(head, dtype):
    """Logits and their gradients are in bf16."""
    gradient, error = SMALL.gradient_and_error(head, SMALL.drawn(), dtype)
    assert error < 0.01
    assert torch.equal(gradient.bfloat16().float(), gradient.float()) == (dtype == torch.bfloat16)
