"""Triton's kernels around a convolution against formulas in float64; run by tests/test_interpreted_kernels.py. Tensors
that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conv_bias_relu_oracle import SHAPES, Case, Inputs, expected, inputs
from torch import Tensor

from common.ops.conv_bias_relu import grouped, triton
from common.ops.conv_bias_relu.cudnn import conv_then_epilogue
from common.ops.conv_bias_relu.reference import Shape, grouped_3x3
from common.ops.tiling import tiles

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
GROUPED = [
    Case(2, 16, 16, 5, 5, 3, 1, 1, 4),
    Case(2, 16, 16, 5, 3, 3, 2, 1, 4),
    Case(1, 24, 24, 4, 6, 3, 2, 1, 3),
    Case(1, 20, 20, 3, 2, 3, 1, 1, 10),
    Case(1, 64, 64, 1, 2, 3, 1, 1, 2),
    Case(1, 16, 16, 1, 1, 3, 2, 1, 4),
]


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles on a device of several multiprocessors, so that programs walk over several tiles."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 3)
    for name, tile in triton.TILES.items():
        monkeypatch.setitem(triton.TILES, name, tile._replace(columns=16, elements=128, programs=1))
    monkeypatch.setattr(grouped, "multiprocessors", lambda device: 6)
    for name in grouped.TILES:
        monkeypatch.setitem(grouped.TILES, name, grouped.Tile(places=16, channels=16, warps=4, programs=1))


def check(
    case: Case,
    given: Inputs,
    relu: bool,
    added: bool,
    function: Callable[..., Tensor] = conv_then_epilogue,
) -> None:
    leaves = [value.requires_grad_() for value in (given.x, given.weight, given.bias, given.residual)]
    leaves = leaves if added else leaves[:3]
    y = function(*leaves[:3], case.stride, case.padding, case.groups, relu, given.residual if added else None)
    found = [y.detach(), *torch.autograd.grad(y, leaves, given.dy)]
    names = ["y", "x", "weight", "bias", "residual"][: len(found)]
    formulas = expected(case, given, relu, added, mask=y.detach() > 0)
    for name, value, formula in zip(names, found, formulas, strict=True):
        assert value.dtype == given.x.dtype, name
        error = (value.double() - formula).norm() / formula.norm()
        assert error < TOLERANCE[given.x.dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("relu", "added"), [(True, False), (True, True), (False, True), (False, False)])
def test_result_and_gradients_are_the_formulas(relu: bool, added: bool, dtype: torch.dtype) -> None:
    check(SHAPES[0], inputs(SHAPES[0], dtype), relu, added)


@pytest.mark.parametrize("case", SHAPES[1:], ids=str)
def test_other_shapes(case: Case) -> None:
    check(case, inputs(case, torch.float32), True, True)


def test_gradients_in_other_memory_are_copied() -> None:
    given = inputs(SHAPES[1], torch.float32)
    check(SHAPES[1], given._replace(dy=given.dy.contiguous(), residual=given.residual.contiguous()), True, True)


def test_what_is_not_needed_is_not_computed() -> None:
    given = inputs(SHAPES[0], torch.float32)
    assert triton.masked(given.dy, None, False)[0] is given.dy
    assert triton.masked(given.dy, None, True)[0] is given.dy
    assert triton.masked(given.dy, given.residual, False)[1] is None


def test_not_a_number_stays_one_and_passes_no_gradient() -> None:
    given = inputs(SHAPES[0], torch.float32)
    broken: Tensor = given.residual.clone()
    broken[0, 0, 0, 0] = torch.nan
    y = triton.epilogue_(torch.zeros_like(broken), torch.zeros(broken.shape[1]), broken, True)
    assert torch.equal(y.isnan(), broken.isnan())
    dz, _ = triton.masked(given.dy, y, False)
    assert dz[0, 0, 0, 0] == 0


def test_no_pictures() -> None:
    empty = torch.empty(0, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    assert triton.epilogue_(empty, torch.zeros(8), None, True).shape == empty.shape


# Grouped convolutions


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_grouped_convolutions_are_the_formulas(case: Case) -> None:
    assert grouped_3x3((case.channels_out, case.channels_in // case.groups, 3, 3), Shape(case.stride, 1, case.groups))
    check(case, inputs(case, torch.float32), True, False, grouped.conv_bias_relu)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grouped_convolutions_of_half_tensors(dtype: torch.dtype) -> None:
    check(GROUPED[1], inputs(GROUPED[1], dtype), True, True, grouped.conv_bias_relu)


@pytest.mark.parametrize(("relu", "added"), [(False, True), (False, False)])
def test_grouped_convolutions_without_a_relu(relu: bool, added: bool) -> None:
    check(GROUPED[0], inputs(GROUPED[0], torch.float32), relu, added, grouped.conv_bias_relu)


def test_a_weight_in_other_memory_is_read_by_its_strides() -> None:
    given = inputs(GROUPED[0], torch.float32)
    other = given._replace(weight=given.weight.contiguous(), x=given.x.contiguous())
    assert other.weight.stride() != given.weight.stride()
    check(GROUPED[0], other, True, False, grouped.conv_bias_relu)


@pytest.mark.parametrize(
    ("weight_shape", "shape"),
    [
        ((16, 16, 3, 3), Shape(1, 1, 1)),
        ((32, 4, 3, 3), Shape(1, 1, 4)),
        ((16, 4, 1, 1), Shape(1, 0, 4)),
        ((16, 4, 3, 3), Shape(1, 0, 4)),
        ((16, 4, 3, 3), Shape(3, 1, 4)),
        ((12, 3, 3, 3), Shape(1, 1, 4)),
        ((128, 64, 3, 3), Shape(1, 1, 2)),
    ],
)
def test_other_convolutions_are_not_for_the_grouped_kernels(weight_shape: tuple[int, ...], shape: Shape) -> None:
    assert not grouped_3x3(weight_shape, shape)
