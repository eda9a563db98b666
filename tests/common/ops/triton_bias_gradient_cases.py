"""The kernel of a bias's gradient against the sum in float64; run by tests/test_interpreted_kernels.py. Tensors that a
kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch

from common.ops import bias_gradient
from common.ops.bias_gradient import triton
from common.ops.operation import AUTO, OperationRequest
from common.ops.tiling.tiles import Tile
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SUMS = bias_gradient.BIAS_GRADIENT.function("triton")


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, of which a program has several."""
    monkeypatch.setitem(triton.TILES, "sums", Tile(16, 64, 4, 3, 1))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 32), (37, 80), (1, 4), (3, 17)], ids=["even", "odd", "one", "narrow"]
)
def test_sums_are_those_of_float64(rows: int, columns: int, dtype: torch.dtype) -> None:
    d_RC = torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows)).to(dtype)
    found = SUMS(d_RC, dtype)
    expected = d_RC.double().sum(0)
    assert (found.shape, found.dtype) == ((columns,), dtype)
    assert (found.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_rows_apart_in_memory_are_the_same_and_capturable() -> None:
    wide_RC = torch.randn((9, 20), generator=torch.Generator().manual_seed(0))
    with Capturable():
        found = SUMS(wide_RC[:, :12], torch.float32)
    torch.testing.assert_close(found, wide_RC[:, :12].sum(0))


def test_half_precision_sums_beyond_its_own_steps() -> None:
    """In fp16, 4,096 + 1 is 4,096."""
    d_RC = torch.ones(5000, 4, dtype=torch.float16)
    assert SUMS(d_RC, torch.float32).tolist() == [5000.0] * 4


def test_double_precision_is_left_to_pytorch() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float64, {})
    assert bias_gradient.BIAS_GRADIENT.select(AUTO, request).name == "reference"
