"""The Triton cast against the reference; run by
tests/test_interpreted_kernels.py.

Triton's interpreter rounds to FP8 in its own way. Here every scaled value is one of the format, which needs no
rounding; that a GPU rounds as the definition says is tested on one.
"""

from __future__ import annotations

import math

from tests import fp8_oracle as oracle
import pytest
import torch
from tests.fp8_oracle import E4M3, E5M2
from torch import Tensor

from common.ops.fp8_cast import triton as fp8_cast_triton
from common.ops.fp8_cast.reference import LARGEST_SCALE, Scaling, cast_reference
from common.ops.fp8_cast.triton import Tile
from common.ops.linear.fp8 import Fp8Product

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, several tiles for each."""
    monkeypatch.setitem(fp8_cast_triton.TILES, "cast", Tile(64, 32, 4, 3, 1))


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def values_of_the_format(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Powers of two and 1.5 times them, of both signs, at most half the largest value of the format."""
    generator = torch.Generator().manual_seed(seed)
    lowest = {E4M3: -5, E5M2: -13}[dtype]
    highest = {E4M3: 7, E5M2: 14}[dtype]
    exponent = torch.randint(lowest, highest, (rows, columns), generator=generator).float()
    mantissa = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, 1.0, 1.5)
    sign = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, 1.0, -1.0)
    return (sign * mantissa * torch.exp2(exponent)).to(torch.bfloat16)


def both(x: Tensor, scale: float, dtype: torch.dtype, transpose: bool = True) -> None:
    """Cast with both, and compare every byte and all state."""
    ours, plain = scaling(scale), scaling(scale)
    found, expected = fp8_cast_triton.cast(x, ours, dtype, transpose), cast_reference(x, plain, dtype, transpose)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    if transpose:
        assert found.transposed is not None
        assert torch.equal(found.transposed.view(torch.uint8), expected.data.view(torch.uint8).t())
    else:
        assert found.transposed is None
    assert torch.equal(found.scale_inverse, expected.scale_inverse)
    assert torch.equal(ours.scale, plain.scale)
    assert not ours.pending.any()


@FORMATS
@pytest.mark.parametrize("shape", [(16, 16), (64, 32), (208, 112), (272, 48)])
@pytest.mark.parametrize("transpose", [True, False])
def test_bytes_and_scales_equal_the_plain_cast(shape: tuple[int, int], transpose: bool, dtype: torch.dtype) -> None:
    both(values_of_the_format(*shape, dtype), 2.0, dtype, transpose)


@FORMATS
def test_fp16_input(dtype: torch.dtype) -> None:
    both(values_of_the_format(80, 48, dtype).half(), 0.5, dtype)


@FORMATS
def test_saturates(dtype: torch.dtype) -> None:
    both(values_of_the_format(80, 48, dtype), 64.0, dtype)


@FORMATS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan_and_leaves_the_scale(
    value: float, dtype: torch.dtype, rounded_conversions: None
) -> None:
    x = values_of_the_format(80, 48, dtype)
    x[70, 40] = value
    both(x, 1.0, dtype)


@FORMATS
def test_zeros(dtype: torch.dtype) -> None:
    both(torch.zeros(80, 48, dtype=torch.bfloat16), 3.0, dtype)
    both(torch.zeros(80, 48, dtype=torch.bfloat16), 0.0, dtype)


@FORMATS
@pytest.mark.parametrize("rows", [80, 600])
def test_first_use(rows: int, dtype: torch.dtype) -> None:
    x = values_of_the_format(rows, 48, dtype) / 16
    peak = oracle.LARGEST[dtype] / 64  # so that the first scale is a power of two, 16
    x = x.clamp(-peak, peak)
    x[0, 47] = peak
    x[-1, 3] = 2 * peak
    both(x, 0.0, dtype)


@FORMATS
def test_the_scale_of_numbers_near_the_smallest(dtype: torch.dtype) -> None:
    ours = scaling()
    fp8_cast_triton.cast(torch.full((16, 16), 2e-38, dtype=torch.bfloat16), ours, dtype, True)
    assert ours.scale.item() == LARGEST_SCALE


@FORMATS
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_frozen_scales_are_used_and_left(scale: float, dtype: torch.dtype) -> None:
    x, ours, plain = values_of_the_format(80, 48, dtype), scaling(scale), scaling(scale)
    found, expected = fp8_cast_triton.cast(x, ours, dtype, True, True), cast_reference(x, plain, dtype, True, True)
    assert torch.equal(found.scale_inverse, expected.scale_inverse)
    assert (ours.scale, plain.scale) == (scale, scale)
    assert not ours.pending.any()


@FORMATS
def test_scales_follow_use_by_use(dtype: torch.dtype) -> None:
    ours, amaxes = scaling(1.0), []
    for seed in range(3):
        x = values_of_the_format(208, 112, dtype, seed) * 2.0**seed
        amaxes.append(x.float().abs().max().item())
        fp8_cast_triton.cast(x, ours, dtype, True)
        assert ours.scale.item() == oracle.scale_of(amaxes[-1], dtype)


def test_the_product_takes_the_kernel() -> None:
    weight = values_of_the_format(32, 48, E4M3).requires_grad_()
    product = Fp8Product(weight)
    x, dy = values_of_the_format(64, 48, E4M3, 1).requires_grad_(), values_of_the_format(64, 32, E5M2, 2)
    product.scales.copy_(torch.tensor([2.0, 0.5, 1.0]))
    y = product(x, weight, None)
    y.backward(dy)
    wide = [t.detach().double() for t in (x, weight, dy)]
    for found, expected in (
        (y, wide[0] @ wide[1].t()),
        (x.grad, wide[2] @ wide[1]),
        (weight.grad, wide[2].t() @ wide[0]),
    ):
        assert found is not None
        torch.testing.assert_close(found.detach().double(), expected, rtol=2.0**-8, atol=expected.abs().max() * 1e-5)
    formats = (E4M3, E4M3, E5M2)
    assert product.scales.tolist() == [oracle.scale_of(t.abs().max(), f) for t, f in zip(wide, formats, strict=True)]
