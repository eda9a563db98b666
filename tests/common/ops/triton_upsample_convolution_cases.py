"""Test the kernels that sum the weights of an upsampling convolution, bit by bit against the reference.

tests/test_interpreted_kernels.py runs this file. Fresh memory holds NaN.
"""

from __future__ import annotations

import pytest
import torch

from common.ops.operation import AUTO, OperationRequest
from common.ops.upsample_convolution import UPSAMPLE_CONVOLUTION, summed_taps, triton
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_sums_and_their_gradient_are_the_references_to_the_bit(
    memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 35, 3, 3, generator=random).to(dtype).to(memory_format=memory_format).requires_grad_()
    dtaps = torch.randn(35, 40, 4, 4, generator=random).to(dtype)  # strides differ from those of the taps
    found, plain = triton.summed_taps(weight), summed_taps(weight)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, plain)
    (gradient,), (reference,) = (torch.autograd.grad(taps, weight, dtaps) for taps in (found, plain))
    assert gradient.stride() == weight.stride()
    torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=1e-6)


def test_both_directions_are_capturable() -> None:
    weight = torch.randn(3, 3, 3, 3).requires_grad_()
    with Capturable():
        torch.autograd.grad(triton.summed_taps(weight).sum(), weight)


def test_the_kernels_are_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float16, {"channels": 64})
    assert UPSAMPLE_CONVOLUTION.select(AUTO, request).name == "transposed"
