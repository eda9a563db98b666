"""Test special values, refused inputs, other tiles, and bitwise equality between operations of a decoder.

Cases of the operations cannot express them. tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops.dropout.reference import DropoutMask
from common.ops.fp8_cast.reference import Fp8Tensor, Scaling
from common.ops.lora_input import Region
from common.ops.lora_input import triton as lora_triton
from common.ops.row_norm import triton as row_norm_triton
from common.ops.swiglu import SWIGLU
from common.ops.swiglu import triton as swiglu_triton
from common.ops.swiglu.cases import CASES as SWIGLU_CASES
from common.ops.tile import Tile
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def scaling(scale: float = 0.0) -> Scaling:
    return Scaling(torch.tensor(scale), torch.zeros(2, dtype=torch.int32))


def test_norm_of_zeros_without_epsilon_in_missing_rows_leaves_a_scale() -> None:
    """Rows of the sample beyond the last one have no root mean square."""
    ours = scaling()
    row_norm_triton.forward(random(3, 8), None, torch.ones(8), 0.0, fp8=ours)
    assert 448 / 3 < ours.scale < 448


@pytest.mark.parametrize("region", [Region(), Region(torch.arange(100, 109), 2999, 33)], ids=["whole", "part"])
def test_a_recomputed_norm_and_its_dropout_have_the_bits_of_the_first_time(region: Region) -> None:
    residual, weight, mask = random(9, 1100), random(1100, seed=1), DropoutMask(0.1, torch.tensor(-5), 5)
    normed = row_norm_triton.forward(residual, None, weight, 1e-5)
    assert normed.residual is residual
    assert normed.y is not None
    assert torch.equal(row_norm_triton.recompute(residual, normed.moments, weight), normed.y)
    found = lora_triton.dropped_norm(residual, normed.moments, weight, mask, region)
    assert torch.equal(found, lora_triton.dropped(normed.y, mask, region))


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 37, "features": 200, "fp8": False, "save": False},
        {"tokens": 70, "features": 130},
        {"tokens": 70, "features": 130, "scales": (0.0, 3.7, 37.0), "frozen": True},
    ],
    ids=["16 bits", "first use", "frozen"],
)
def test_swiglu_in_tiles_of_several_rows(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in swiglu_triton.TILES:
        monkeypatch.setitem(swiglu_triton.TILES, key, Tile(rows=16, columns=128, warps=4, programs=3, stages=1))
    check(SWIGLU, "triton", SWIGLU_CASES[1], sizes, torch.bfloat16, torch.device("cpu"))


def test_swiglu_of_large_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    assert swiglu_triton.forward(gate_up).y.tolist() == [[0.0, 0.0, 180.0, 2e4]]
    assert swiglu_triton.backward(torch.ones(1, 4), gate_up)[0].tolist() == [[0, 0, 2, 2, 0, 0, 90, 1e4]]


def test_what_is_not_finite_becomes_nan_in_fp8_and_leaves_the_scale() -> None:
    gate_up = random(5, 8)
    gate_up[3, 6] = torch.inf
    ours, saved = scaling(3.0), scaling(5.0)
    found = swiglu_triton.forward(gate_up, fp8=ours, save_fp8=saved)
    assert isinstance(found.saved, Fp8Tensor)
    assert found.y8.data.float().isnan().nonzero().tolist() == [[3, 2]]
    assert found.saved.data.float().isnan().nonzero().tolist() == [[3, 6]]
    assert (ours.scale, saved.scale) == (3.0, 5.0)
