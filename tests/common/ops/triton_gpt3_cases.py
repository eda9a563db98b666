"""The Triton operations between GPT-3's products against the plain versions; run by tests/test_interpreted_kernels.py.

16-bit and fp32 results are compared with the plain versions in float64, FP8 with the plain version in the same dtype:
a sum in another order moves a value over the middle between two codes now and then, so that a few bytes differ by one.
Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here.
"""

from __future__ import annotations

import pytest
import torch
from fp8_oracle import assert_same_fp8, codes
from torch import Tensor

from common.ops.fp8_cast.plain import Fp8Tensor, Scaling
from common.ops.layer_norm_1p import plain as norm_plain
from common.ops.layer_norm_1p import triton as norm_triton
from common.ops.norm.parted_rows import parts_of

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SCALES = pytest.mark.parametrize("scale", [0.0, 3.7], ids=["first use", "later use"])
FROZEN = pytest.mark.parametrize("frozen", [False, True], ids=["delayed", "frozen"])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def double(*given: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in given]


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


# LayerNorm

PARTS = pytest.mark.parametrize(
    ("tokens", "features", "parts"), [(13, 96, 3), (5, 1, 1), (3, 1000, 1), (2, 4700, 5), (70, 24, 3)]
)
"""Several rows a program, one feature, air behind the last part of one and of several, several groups of rows."""


def norm_inputs(tokens: int, features: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Residual, delta, what is added to every row, weight, bias; the residual's mean is far from zero."""
    return (
        random(tokens, features, dtype=dtype) * 3 + 5,
        random(tokens, features, seed=1, dtype=dtype),
        random(features, seed=2, dtype=dtype),
        random(features, seed=3, dtype=dtype) / 4,
        random(features, seed=4, dtype=dtype),
    )


@DTYPES
@PARTS
@pytest.mark.parametrize("given", ["both", "delta", "neither"])
def test_norm_equals_plain(given: str, tokens: int, features: int, parts: int, dtype: torch.dtype) -> None:
    assert parts_of(features).count == parts
    residual, delta, added, weight, bias = norm_inputs(tokens, features, dtype)
    total = residual
    if given != "neither":
        total = (residual.float() + delta.float() + (added.float() if given == "both" else 0)).to(dtype)
    found = norm_triton.forward(
        residual, None if given == "neither" else delta, added if given == "both" else None, weight, bias, 1e-5
    )
    assert (found.residual - total).abs().max() <= 2 * torch.finfo(dtype).eps * total.abs().max()
    assert (found.residual is residual) == (given == "neither")
    expected = norm_plain.forward_torch(found.residual.double(), None, None, weight.double(), bias.double(), 1e-5)
    assert_close(found.moments, expected.moments, torch.float32)
    assert_close(found.y, expected.y, dtype)
    assert found.y8 is None
    again = norm_triton.recompute(found.residual, found.moments, weight, bias)
    assert_close(again, expected.y, dtype)


@SCALES
@FROZEN
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("features", [96, 200])
def test_norm_writes_fp8(features: int, half: bool, frozen: bool, scale: float) -> None:
    given = norm_inputs(70, features, torch.bfloat16)
    ours, plain = scaling(scale), scaling(scale)
    options = {"half": half, "frozen_scales": frozen}
    found = norm_triton.forward(*given, 1e-5, fp8=ours, **options)
    expected = norm_plain.forward_torch(*given, 1e-5, fp8=plain, **options)
    assert_same_fp8(found.y8, ours, expected.y8, plain, torch.bfloat16)
    assert (ours.scale == scale) == frozen
    assert (found.y is not None) == half


def test_norm_of_missing_rows_without_epsilon_leaves_a_scale() -> None:
    """Rows of the sample beyond the last one, to which a bias is added, have no variance."""
    ours = scaling()
    given = (random(3, 8, dtype=torch.bfloat16), None, torch.full((8,), 7.0), torch.zeros(8), torch.zeros(8))
    norm_triton.forward(*given, 0.0, fp8=ours)
    assert 448 / 3 < ours.scale < 448


@DTYPES
@PARTS
@pytest.mark.parametrize("other", [True, False])
def test_gradients_of_the_norm_equal_plain(
    other: bool, tokens: int, features: int, parts: int, dtype: torch.dtype
) -> None:
    if features == 1:
        pytest.skip("the gradient is zero but for rounding")
    residual, dy, _, weight, _ = norm_inputs(tokens, features, dtype)
    d_residual = random(tokens, features, seed=5, dtype=dtype) if other else None
    moments = norm_plain.forward_torch(residual, None, None, weight, weight, 1e-5).moments
    found, none = norm_triton.backward(dy, residual, moments, weight, d_residual)
    wide = double(dy, residual, moments, weight, d_residual)
    assert_close(found, norm_plain.backward_torch(*wide)[0], dtype)
    assert none is None
    sums = norm_triton.parameter_gradients(dy, residual, moments, found if other else None)
    expected = norm_plain.parameter_gradients_torch(*double(dy, residual, moments, found if other else None))
    for name in ("weight", "bias", "added"):
        ours, plain = getattr(sums, name), getattr(expected, name)
        if name == "added" and not other:
            assert ours is plain is None
            continue
        assert ours.dtype == torch.float32
        assert (ours.double() - plain).norm() < 1e-5 * plain.norm() + 1e-4


@SCALES
@FROZEN
@pytest.mark.parametrize("features", [96, 200])
def test_gradient_of_the_norm_in_fp8(features: int, frozen: bool, scale: float) -> None:
    residual, dy, _, weight, _ = norm_inputs(70, features, torch.bfloat16)
    dy, d_residual = dy * 1e-7, random(70, features, seed=5, dtype=torch.bfloat16) * 1e-7
    moments = norm_plain.forward_torch(residual, None, None, weight, weight, 1e-5).moments
    ours, plain = scaling(scale * 1e9), scaling(scale * 1e9)
    given = (dy, residual, moments, weight, d_residual)
    dx, found = norm_triton.backward(*given, fp8=ours, frozen_scales=frozen)
    expected_dx, expected = norm_plain.backward_torch(*given, fp8=plain, frozen_scales=frozen)
    assert_same_fp8(found, ours, expected, plain, torch.bfloat16)
    assert_close(dx, expected_dx.double(), torch.bfloat16)
    assert codes(found).count_nonzero() > 0.99 * dy.numel()


def test_norm_refuses_what_it_would_misread() -> None:
    zeros = torch.zeros(8)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        norm_triton.forward(random(8, 6).t(), None, None, zeros, zeros, 1e-5)
    with pytest.raises(ValueError, match="added must be contiguous"):
        norm_triton.forward(random(6, 8), None, torch.zeros(16)[::2], zeros, zeros, 1e-5)
