"""The Triton operations of a decoder against the plain versions; run by tests/test_interpreted_kernels.py.

16-bit and fp32 results are compared with the plain versions in float64, FP8 with the plain version in the same dtype:
a sum in another order moves a value over the middle between two codes now and then, so that a few bytes differ by one.
Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor, Scaling
from common.ops.rms_norm import plain as rms_norm_plain
from common.ops.rms_norm import triton as rms_norm_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("scale", [0.0, 3.7], ids=["first use", "later use"])
FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["delayed", "frozen"])
SEED = torch.tensor(-0x0123456789ABCDEF)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def codes(x8: Fp8Tensor) -> Tensor:
    """Numbers of the codes in order of their values."""
    byte = x8.data.view(torch.uint8).int()
    return torch.where(byte < 128, byte, 128 - byte)


def assert_same_fp8(
    found: Fp8Tensor | None, ours: Scaling, expected: Fp8Tensor | None, plain: Scaling, of: torch.dtype
) -> None:
    """The same bytes but for a few neighbours, the same scale used, and the same left behind."""
    assert found is not None
    assert expected is not None
    assert found.data.dtype == expected.data.dtype
    assert found.source.dtype == of
    assert found.source.shape == found.data.shape
    apart = (codes(found) - codes(expected)).abs()
    assert apart.max() <= 1
    assert apart.count_nonzero() <= max(1, apart.numel() // 100)
    torch.testing.assert_close(found.scale_inverse, expected.scale_inverse, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.scale, plain.scale, rtol=1e-6, atol=0)
    assert not ours.pending.any()


# RMSNorm


def norm_inputs(tokens: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Residual, what is added to it, weight."""
    return (
        random(tokens, features, dtype=dtype) * 3,
        random(tokens, features, seed=1, dtype=dtype),
        (random(features, seed=2) + 1).to(dtype),
    )


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "features", "added"), [(13, 96, True), (5, 1, False), (3, 1000, True), (2, 9000, False)]
)
def test_norm_equals_plain(tokens: int, features: int, added: bool, dtype: torch.dtype) -> None:
    residual, delta, weight = norm_inputs(tokens, features, dtype)
    found = rms_norm_triton.forward(residual, delta if added else None, weight, 1e-5)
    total = (residual.float() + delta.float()).to(dtype) if added else residual
    expected = rms_norm_plain.forward_torch(total.double(), None, weight.double(), 1e-5)
    assert torch.equal(found.residual, total)
    assert (found.residual is residual) == (not added)
    assert_close(found.inverse_rms, expected.inverse_rms, torch.float32)
    assert_close(found.y, expected.y, dtype)
    assert found.y8 is None
    again = rms_norm_triton.recompute(found.residual, found.inverse_rms, weight)
    assert torch.equal(again, found.y)


@SCALES
@FROZEN
@pytest.mark.parametrize("half", [True, False])
def test_norm_writes_fp8(half: bool, frozen: bool, scale: float) -> None:
    residual, delta, weight = norm_inputs(70, 200, torch.bfloat16)
    ours, plain = scaling(scale), scaling(scale)
    given = {"half": half, "frozen_scales": frozen}
    found = rms_norm_triton.forward(residual, delta, weight, 1e-5, fp8=ours, **given)
    expected = rms_norm_plain.forward_torch(residual, delta, weight, 1e-5, fp8=plain, **given)
    assert_same_fp8(found.y8, ours, expected.y8, plain, torch.bfloat16)
    assert (ours.scale == scale) == frozen
    assert (found.y is not None) == half


def test_norm_of_zeros_without_epsilon_in_missing_rows_leaves_a_scale() -> None:
    """Rows of the sample beyond the last one have no root mean square."""
    ours = scaling()
    rms_norm_triton.forward(random(3, 8, dtype=torch.bfloat16), None, torch.ones(8), 0.0, fp8=ours)
    assert 448 / 3 < ours.scale < 448


@DTYPES
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize(("tokens", "features"), [(13, 96), (2, 9000)])
def test_gradient_of_the_norm_equals_plain(tokens: int, features: int, other: bool, dtype: torch.dtype) -> None:
    residual, dy, weight = norm_inputs(tokens, features, dtype)
    d_residual = random(tokens, features, seed=3, dtype=dtype) if other else None
    inverse_rms = rms_norm_plain.forward_torch(residual, None, weight, 1e-5).inverse_rms
    found, none = rms_norm_triton.backward(dy, residual, inverse_rms, weight, d_residual)
    expected, _ = rms_norm_plain.backward_torch(
        dy.double(), residual.double(), inverse_rms.double(), weight.double(), wide(d_residual)
    )
    assert_close(found, expected, dtype)
    assert none is None


@SCALES
@FROZEN
def test_gradient_of_the_norm_in_fp8(frozen: bool, scale: float) -> None:
    residual, dy, weight = norm_inputs(70, 200, torch.bfloat16)
    dy, d_residual = dy * 1e-7, random(70, 200, seed=3, dtype=torch.bfloat16) * 1e-7
    inverse_rms = rms_norm_plain.forward_torch(residual, None, weight, 1e-5).inverse_rms
    ours, plain = scaling(scale * 1e9), scaling(scale * 1e9)
    given = (dy, residual, inverse_rms, weight, d_residual)
    _, found = rms_norm_triton.backward(*given, fp8=ours, frozen_scales=frozen)
    _, expected = rms_norm_plain.backward_torch(*given, fp8=plain, frozen_scales=frozen)
    assert_same_fp8(found, ours, expected, plain, torch.bfloat16)
    assert codes(found).count_nonzero() > 0.99 * dy.numel()


def test_norm_refuses_what_it_would_misread() -> None:
    with pytest.raises(ValueError, match="residual must be contiguous"):
        rms_norm_triton.forward(random(8, 6).t(), None, torch.ones(8), 1e-5)
