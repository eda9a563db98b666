"""The Triton kernels behind a weight's gradient in FP8 against float64; run by tests/test_interpreted_kernels.py.

The one that lets memory add can't be interpreted, nor can NaN in FP8: tests/gpu has both.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops.fp8_cast.plain import E4M3, E5M2
from common.ops.transpose_fp8 import triton as transpose_triton
from common.ops.transpose_fp8.plain import transpose_torch
from common.ops.weight_gradient import triton as weight_gradient_triton
from tests.common.ops.test_weight_gradient import operands, product


def no_room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raise AssertionError("the kernel adds by itself")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 48, 64), (32, 16, 16), (112, 80, 48)])
def test_products_add_up(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    small = weight_gradient_triton.Tile(32, 32, 32, 2, 4, 2, reduce=False, flatten=False)
    monkeypatch.setitem(weight_gradient_triton.TILES, "weight gradient", small)
    given = operands(*shape)
    gradient = torch.ones(shape[:2], dtype=dtype)
    for _ in range(2):
        weight_gradient_triton.accumulate(*given, gradient, no_room)
    wanted = 1.0 + 2.0 * product(*given)
    assert float((gradient.double() - wanted).norm() / wanted.norm()) < (2**-8 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("to", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("runs", [1, 2, 4])
def test_transposes_bring_rows_to_one_scale(runs: int, to: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(runs)
    matrix = (torch.randn(48, 40, generator=generator) * 20).to(to)
    factors = 0.5 ** torch.arange(runs)  # whose roundings carry nothing into the exponent, which isn't interpreted
    found = transpose_triton.transpose(matrix, torch.empty_like(matrix), factors)
    expected = transpose_torch(matrix, torch.empty_like(matrix), factors)
    limits = torch.finfo(to)
    smallest = limits.smallest_normal * limits.eps  # below normal numbers the interpreter cuts off
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.0, atol=smallest)
    own = 48 // runs
    assert torch.equal(found[:, :own].float(), matrix[:own].t().float()), "a factor of 1 changes nothing"
