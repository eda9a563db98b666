"""The end of a residual block against a 1x1 convolution of the concatenation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.stable_diffusion.residual import add_shortcut, rows_of
from common.ops.bias_gradient import row_sums_reference


def drawn(*shape: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    if len(shape) == 4:
        made = made.contiguous(memory_format=torch.channels_last)
    return made.requires_grad_()


@pytest.mark.parametrize("channels", [(6,), (6, 2), (3, 3)])
@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
def test_it_is_the_convolution_of_the_concatenation_with_all_gradients(channels, size):
    y, bias, weight = drawn(2, 4, *size), drawn(4), drawn(4, sum(channels), 1, 1)
    inputs = tuple(drawn(2, count, *size) for count in channels)
    found = add_shortcut(y, bias, weight, inputs, row_sums_reference)
    wanted = y + F.conv2d(torch.cat(inputs, 1), weight, bias)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves = [y, bias, weight, *inputs]
    d = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, d), torch.autograd.grad(wanted, leaves, d), rtol=1e-12, atol=1e-12
    )


def test_other_memory_is_refused_rather_than_copied():
    with pytest.raises(RuntimeError, match="view"):
        rows_of(torch.zeros(2, 4, 3, 5))
