"""Test properties of the Triton operations between GPT-3's products that cases cannot express.

tests/test_interpreted_kernels.py runs this file.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops.fp8_cast.reference import Scaling
from common.ops.qkv_gradient import QKV_GRADIENT
from common.ops.qkv_gradient import cases as qkv_cases
from common.ops.qkv_gradient import triton as qkv_triton
from common.ops.row_norm import LAYER_NORM_1P
from common.ops.row_norm import cases as norm_cases
from common.ops.row_norm import triton as norm_triton
from common.ops.tile import Tile
from tests.operation_checks import check

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_programs_share_the_rows_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, there is one program on a CPU."""
    for name in ("forward", "backward"):
        monkeypatch.setitem(norm_triton.TILES, name, norm_triton.TILES[name].replace(programs=3))
    check(LAYER_NORM_1P, "triton", norm_cases.LAYER_NORM_1P[0], {"tokens": 25, "features": 24}, torch.bfloat16, CPU)


def test_programs_share_the_tokens_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, there is one program per head on a CPU."""
    monkeypatch.setitem(qkv_triton.TILES, "join", Tile(rows=16, warps=4, programs=12, stages=1))
    sizes = {"tokens": 40, "heads": 2, "head_size": 16, "layout": "mixed"}
    check(QKV_GRADIENT, "triton", qkv_cases.CASES[0], sizes, torch.bfloat16, CPU)


def test_norm_of_missing_rows_without_epsilon_leaves_a_scale() -> None:
    """Rows of the sample beyond the last one, to which a bias is added, have no variance."""
    ours = Scaling(torch.tensor(0.0), torch.zeros(2, dtype=torch.int32))
    zeros = torch.zeros(8)
    norm_triton.forward(random(3, 8, dtype=torch.bfloat16), None, zeros, 0.0, zeros, torch.full((8,), 7.0), fp8=ours)
    assert 448 / 3 < ours.scale < 448


def test_norm_refuses_what_it_would_misread() -> None:
    zeros = torch.zeros(8)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        norm_triton.forward(random(8, 6).t(), None, zeros, 1e-5, zeros)
    with pytest.raises(ValueError, match="added must be contiguous"):
        norm_triton.forward(random(6, 8), None, zeros, 1e-5, zeros, torch.zeros(16)[::2])


def test_gradient_of_qkv_refuses_what_it_would_misread() -> None:
    with pytest.raises(ValueError, match="must be dense"):
        qkv_triton.join(random(4, 2, 6)[:, :, ::2], random(4, 2, 3), random(4, 2, 3))
    with pytest.raises(ValueError, match=r"\(T, H, D\) each"):
        qkv_triton.join(random(4, 2, 3), random(4, 1, 3), random(4, 1, 3))
