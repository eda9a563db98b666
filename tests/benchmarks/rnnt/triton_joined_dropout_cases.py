"""Triton's dropout with joined frames against the reference; run by tests/test_interpreted_kernels.py."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rnnt.ops.joined_dropout.reference import joined_dropout_reference
from benchmarks.rnnt.ops.joined_dropout.triton import joined_dropout

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SEED = torch.tensor(11)


@pytest.mark.parametrize(
    ("shape", "p", "dtype"),
    [
        ((4, 3, 6), 0.3, torch.float32),
        ((5, 1, 2), 0.3, torch.float16),  # an odd frame
        ((1, 2, 3), 0.5, torch.bfloat16),  # an odd width of an even number of elements
        ((3, 2, 2050), 0.1, torch.float32),  # more than a block
        ((3, 2, 4), 0.0, torch.float32),
        ((0, 2, 4), 0.3, torch.float32),
    ],
)
def test_both_directions_are_those_of_the_reference(shape, p, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype)
    found_x, expected_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = joined_dropout(found_x, p, SEED, 3), joined_dropout_reference(expected_x, p, SEED, 3)
    assert torch.equal(found, expected)
    dy = torch.randn(expected.shape, generator=generator).to(dtype)
    found.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(found_x.grad, expected_x.grad)
