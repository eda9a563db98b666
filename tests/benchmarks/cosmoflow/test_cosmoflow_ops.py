"""The references of CosmoFlow's operations: formulas, PyTorch's own operations, special values and errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cosmoflow.ops.conv_leaky_pool import CONV_LEAKY_POOL, conv_leaky_pool
from benchmarks.cosmoflow.ops.first_convolution import FIRST_CONVOLUTION, first_convolution
from benchmarks.cosmoflow.ops.log_counts import log_counts_reference

PASSES = CONV_LEAKY_POOL.reference


def test_the_logarithm_of_counts_is_accurate_and_a_view_of_channels_last_memory():
    counts_NDHWC = torch.tensor([0, 1, 2, 299, 32767, 5, 6, 7], dtype=torch.int16).view(1, 1, 2, 1, 4)
    found = log_counts_reference(counts_NDHWC, torch.float64)
    assert found.shape == (1, 4, 1, 2, 1)
    expected = [math.log1p(count) for count in (0, 1, 2, 299, 32767, 5, 6, 7)]
    assert found.movedim(1, -1).flatten().tolist() == pytest.approx(expected, rel=1e-15)
    assert found.is_contiguous(memory_format=torch.channels_last_3d)


def test_counts_are_converted_before_one_is_added():
    """The sum of 32767 and 1 is no int16, and 1 + 300 is no bfloat16."""
    counts = torch.tensor([32767, 300], dtype=torch.int16).view(2, 1, 1, 1, 1)
    expected = torch.tensor([math.log(32768), math.log(301)]).to(torch.bfloat16)
    assert torch.equal(log_counts_reference(counts, torch.bfloat16).flatten(), expected)


def plain(x: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
    return F.max_pool3d(F.leaky_relu(F.conv3d(x, weight, bias, padding=1), slope), 2)


def inputs(size: tuple[int, int, int] = (4, 6, 2)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 3, *size), (4, 3, 3, 3, 3), (4,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_the_operation_and_its_gradients_are_those_of_pytorchs_three_layers():
    leaves = inputs()
    leaves[2].data.copy_(torch.tensor([-9.0, 0.0, 3.0, -6.0]))
    found, expected = conv_leaky_pool(PASSES, *leaves, 0.3), plain(*leaves, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found < 0).any(), "no window has the slope"
    assert (found > 0).any()
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_the_first_convolution_is_that_of_pytorch_and_its_input_gets_no_gradient():
    leaves = inputs()
    leaves[2].data.copy_(torch.tensor([-9.0, 0.0, 3.0, -6.0]))
    found, expected = first_convolution(FIRST_CONVOLUTION.reference, *leaves, 0.3), plain(*leaves, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    ours = torch.autograd.grad(found, leaves, dy, allow_unused=True)
    theirs = torch.autograd.grad(expected, leaves, dy)
    assert ours[0] is None
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-11, atol=1e-11)


def test_of_equal_voxels_the_first_one_gets_the_gradient_and_a_sum_of_zero_has_the_slope():
    z = torch.full((1, 1, 2, 2, 2), 2.0)
    y, code = PASSES.forward(z, torch.tensor([-2.0]), 0.3)
    assert (y.item(), code.item()) == (0.0, 8)
    dz, d_bias = PASSES.backward(torch.ones(1, 1, 1, 1, 1), code, 0.3)
    assert dz.flatten().tolist() == pytest.approx([0.3, 0, 0, 0, 0, 0, 0, 0])
    assert d_bias.tolist() == pytest.approx([0.3])


def test_a_code_is_the_corner_of_the_largest_voxel():
    for corner in range(8):
        z = torch.zeros(1, 1, 2, 2, 2)
        z.view(-1)[corner] = 1.0
        assert PASSES.forward(z, torch.zeros(1), 0.3)[1].item() == corner


def test_a_value_that_is_no_number_is_not_lost():
    z = torch.zeros(1, 1, 2, 2, 2)
    z[0, 0, 1, 0, 1] = math.nan
    assert PASSES.forward(z, torch.zeros(1), 0.3)[0].isnan().all()


def test_the_gradient_of_the_counts_is_not_computed(monkeypatch):
    x, weight, bias = inputs()
    needed = []
    original = torch.ops.aten.convolution_backward

    def convolution_backward(*arguments: object) -> object:
        needed.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", convolution_backward)
    conv_leaky_pool(PASSES, x.detach(), weight, bias, 0.3).sum().backward()
    assert needed == [[False, True, False]]


def test_a_volume_with_an_odd_edge_is_refused():
    with pytest.raises(ValueError, match=r"4, 5, 2.* no whole windows"):
        conv_leaky_pool(PASSES, *inputs((4, 5, 2)), 0.3)
