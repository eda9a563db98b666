"""The fused linear layer against its formula in float64; run by
tests/test_interpreted_kernels.py. Tensors that a kernel must fill are poisoned first: fresh memory holds NaN here."""

from __future__ import annotations

import pytest
import torch
from linear_relu_oracle import Inputs, expected, inputs
from torch import Tensor

from common.nn.mlp import MLP
from common.ops import linear_relu
from common.ops.linear_relu import triton
from common.ops.operation import AUTO, OperationRequest
from common.ops.tiling import tiles
from tests.capturable import Capturable

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles on a device of several multiprocessors, so that programs walk over several tiles."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 3)
    monkeypatch.setitem(
        triton.TILES, "gradient", triton.TILES["gradient"]._replace(columns=16, elements=128, programs=1)
    )


def check(given: Inputs, dy: Tensor | None = None) -> None:
    leaves = [value.requires_grad_() for value in given[:3]]
    y = triton.linear_relu(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, given.dy if dy is None else dy)]
    for name, value, formula in zip(["y", "x", "weight", "bias"], found, expected(given, y.detach() > 0), strict=True):
        assert value.dtype == given.x.dtype, name
        error = (value.double() - formula).norm() / formula.norm()
        assert error < TOLERANCE[given.x.dtype], f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [(64, 8, 32), (37, 13, 40)], ids=["even", "odd"])
def test_result_and_gradients_are_the_formulas(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(inputs(*sizes, dtype))


@pytest.mark.parametrize("wide", [True, False], ids=["rows apart", "columns apart"])
def test_a_gradient_in_other_memory(wide: bool) -> None:
    given = inputs(37, 8, 40, torch.float32)
    if wide:
        dy = torch.full((37, 100), torch.nan)[:, 3:43].copy_(given.dy)
    else:
        dy = given.dy.t().contiguous().t()
    assert not dy.is_contiguous()
    check(given, dy)


def test_auto_takes_it_and_all_but_the_logit_of_a_stack_run_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_relu.LINEAR_RELU.select(AUTO, OperationRequest(torch.device("cpu"), torch.bfloat16)).name == "fused"
    launches, given = [], inputs(9, 13, 4, torch.float32)
    monkeypatch.setattr(
        triton,
        "relu_gradient",
        lambda *args, pass_=triton.relu_gradient, **rest: launches.append(1) or pass_(*args, **rest),
    )
    stack = MLP(13, (8, 4, 1), logit=True)
    stack.draw(lambda layer: [parameter.fill_(0.1) for parameter in layer.parameters()])
    stack.choose(AUTO, torch.float32)
    with Capturable():
        stack(given.x).sum().backward()
    assert len(launches) == 2
