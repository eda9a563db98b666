"""The kernels that sum an upsampling convolution's weights against the definition in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
from upsample_convolution_oracle import expected, inputs

from common.ops.operation import AUTO, OperationRequest
from common.ops.upsample_convolution import UPSAMPLE_CONVOLUTION, triton
from common.ops.upsample_convolution.taps import summed_taps
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in triton.TILES:
        monkeypatch.setitem(triton.TILES, key, triton.Tile(16, 8, 4))


@DTYPES
@pytest.mark.parametrize("sizes", [(1, 16, 32, 2, 3), (2, 19, 21, 3, 2)], ids=["even", "odd"])
def test_result_and_gradients_are_the_definitions(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias, dy = inputs(*sizes, dtype)
    leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
    y = UPSAMPLE_CONVOLUTION.function("transposed")(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for value, formula in zip(found, expected(x, weight, bias, dy), strict=True):
        assert value.dtype == dtype
        assert (value.double() - formula).norm() < TOLERANCE[dtype] * formula.norm()


@DTYPES
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_sums_and_their_gradient_are_the_references_to_the_bit(
    memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(21, 19, 3, 3, generator=random).to(dtype).to(memory_format=memory_format).requires_grad_()
    dtaps = torch.randn(19, 21, 4, 4, generator=random).to(dtype)  # of other strides than the taps
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
