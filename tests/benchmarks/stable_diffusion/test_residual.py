"""What stands at the end of a block against the sum that it is, with all gradients."""

from __future__ import annotations

import torch

from benchmarks.stable_diffusion.residual import add_residual, maps_of, rows_of
from common.ops.bias_gradient import row_sums_reference


def test_the_bias_gets_its_gradient_behind_the_sum():
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, residual, d = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 3), (5, 3), (5,), (7, 5), (7, 5))
    )
    leaves = [value.requires_grad_() for value in (x, weight, bias, residual)]
    found = add_residual(torch.nn.functional.linear(x, weight, bias.detach()), bias, residual, row_sums_reference)
    wanted = x @ weight.t() + bias + residual
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, d), torch.autograd.grad(wanted, leaves, d), rtol=1e-14, atol=1e-14
    )


def test_rows_are_a_view_and_so_are_maps():
    x_NCHW = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rows_RC = rows_of(x_NCHW)
    assert rows_RC[4 * 5 + 2 * 5 + 3].tolist() == x_NCHW[1, :, 2, 3].tolist()
    back = maps_of(rows_RC, x_NCHW)
    assert torch.equal(back, x_NCHW)
    assert back.data_ptr() == x_NCHW.data_ptr()
