"""Triton's cross network against its formula in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
from cross_network_oracle import Inputs, expected, inputs

from benchmarks.dlrm_dcnv2.ops import cross_network
from benchmarks.dlrm_dcnv2.ops.cross_network import triton
from common.ops.operation import AUTO, OperationRequest
from common.ops.tiling import tiles
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EVEN, ODD = (64, 32, 16), (70, 40, 24)
"""Samples, columns and rank that the tiles below do and do not divide."""


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles on a device of several multiprocessors, so that there are many programs, which walk over several."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 3)
    gradient = triton.TILES["gradient"]._replace(columns=16, elements=256, programs=1)
    monkeypatch.setitem(triton.TILES, "gradient", gradient)
    product = triton.ProductTile(32, 32, 16, 4, 2, 2)
    for key in triton.PRODUCT_TILES:
        monkeypatch.setitem(triton.PRODUCT_TILES, key, product)
    monkeypatch.setattr(triton, "WIDE_TILE", product)


def check(name: str, given: Inputs) -> None:
    leaves = [leaf.requires_grad_() for leaf in given.leaves()]
    y = cross_network.CROSS_NETWORK.function(name)(given.x0, given.v, given.w, given.b)
    found = [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]
    for number, (value, formula) in enumerate(zip(found, expected(given), strict=True)):
        assert value.dtype == given.x0.dtype
        error = (value.double() - formula).norm() / formula.norm()
        assert error < TOLERANCE[given.x0.dtype], f"{number}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [("triton", EVEN, 2), ("triton", ODD, 3), ("triton", ODD, 1), ("fused", EVEN, 1), ("fused", ODD, 3)],
)
def test_result_and_gradients_are_the_formulas(name: str, sizes: tuple[int, int, int], layers: int) -> None:
    check(name, inputs(*sizes, layers, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_tensors(dtype: torch.dtype) -> None:
    check("triton", inputs(*ODD, 2, dtype))


def test_an_evaluation_keeps_no_h_and_has_the_same_result() -> None:
    given = inputs(*ODD, 2, torch.float32)
    u, arguments = given.x0 @ given.v[0].t(), (given.w[0], given.b[0], given.x0, given.x0)
    none, y = triton.cross(u, *arguments, False)
    assert none is None
    assert torch.equal(y, triton.cross(u, *arguments, True)[1])


def test_what_would_be_misread_is_refused() -> None:
    given = inputs(16, 32, 16, 1, torch.float32)
    u = given.x0 @ given.v[0].t()
    with pytest.raises(ValueError, match="x0 must be contiguous"):
        triton.cross(u, given.w[0], given.b[0], given.x0.t().contiguous().t(), given.x0, True)


def test_auto_takes_fused_passes_and_both_directions_are_capturable() -> None:
    chosen = cross_network.CROSS_NETWORK.select(AUTO, OperationRequest(torch.device("cpu"), torch.bfloat16))
    assert chosen.name == "fused"
    given = inputs(*EVEN, 2, torch.float32)
    leaves = [leaf.requires_grad_() for leaf in given.leaves()]
    with Capturable():
        torch.autograd.grad(chosen.function(given.x0, given.v, given.w, given.b), leaves, given.dy)


def test_no_samples() -> None:
    given = inputs(0, 32, 16, 1, torch.float32)
    assert triton.cross_network(given.x0, given.v, given.w, given.b).shape == (0, 32)
