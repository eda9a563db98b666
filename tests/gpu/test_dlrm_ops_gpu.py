"""Test the dense networks of DLRM-DCNv2 and DLRM on a GPU, eager and captured.

Their operations are also tested on tensors of more than 2**31 elements.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.dlrm import model as dlrm
from benchmarks.dlrm.ops import dot_interaction
from benchmarks.dlrm_dcnv2 import model as dlrm_dcnv2
from benchmarks.dlrm_dcnv2.ops import cross_network
from common.recommendation.click_network import ClickArchitecture, loss
from tests.benchmarks.dlrm import dot_interaction_oracle
from tests.benchmarks.dlrm_dcnv2 import cross_network_oracle
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
SAMPLES = 6912
TABLES, WIDTH = 26, 128
LARGE, KEPT = 700_000, 1000


def assert_close(found: list[Tensor], formulas: list[Tensor]) -> None:
    for number, (value, formula) in enumerate(zip(found, formulas, strict=True)):
        error = (value.double() - formula).norm() / formula.norm()
        assert error < 1.6e-2, f"{number}: relative error {error:.2e}"


# Offsets beyond int32


def test_more_elements_of_x0_than_int32_counts() -> None:
    assert LARGE * 3456 > 2**31
    given = cross_network_oracle.inputs(KEPT, 3456, 512, 1, torch.bfloat16, device="cuda")
    x0, dy = (torch.zeros(LARGE, 3456, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x0[-KEPT:], dy[-KEPT:] = given.x0, given.dy
    y = cross_network.CROSS_NETWORK.function("fused")(x0.requires_grad_(), given.v, given.w, given.b)
    (dx0,) = torch.autograd.grad(y, x0, dy)
    assert_close([y[-KEPT:].detach(), dx0[-KEPT:]], cross_network_oracle.expected(given)[:2])
    assert not y[:-KEPT].any()
    assert not dx0[:-KEPT].any()


def test_more_elements_of_vectors_than_int32_counts() -> None:
    some, some_dy = dot_interaction_oracle.inputs(KEPT, 27, 128, 480, torch.bfloat16, device="cuda")
    x = torch.zeros(LARGE, 27, 128, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros(LARGE, 480, dtype=torch.bfloat16, device="cuda")
    x[-KEPT:], dy[-KEPT:] = some, some_dy
    y = dot_interaction.DOT_INTERACTION.function("triton")(x.requires_grad_(), 480)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_close([y[-KEPT:].detach(), dx[-KEPT:]], list(dot_interaction_oracle.expected(some, some_dy)))
    assert not y[:-KEPT].any()
    assert not dx[:-KEPT].any()


# Whole networks


def dense_network(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """At its full size."""
    generator = torch.Generator().manual_seed(1)
    if name == "dlrm":
        sizes = ClickArchitecture(13, WIDTH, (512, 256, WIDTH), (1024, 1024, 512, 256, 1))
        return dlrm.DlrmNetwork(sizes, TABLES, {}, CUDA, dtype, generator)
    crossed = dlrm_dcnv2.DlrmDcnv2Architecture(13, WIDTH, (512, 256, WIDTH), (1024, 1024, 512, 256, 1), 3, 512)
    return dlrm_dcnv2.DlrmDcnv2Network(crossed, TABLES, {}, CUDA, dtype, generator)


def training(model: torch.nn.Module, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Return a function that computes loss, gradient of the vectors, and gradients of the parameters."""
    random = torch.Generator("cuda").manual_seed(2)
    dense = torch.randn(SAMPLES, 13, device="cuda", generator=random).to(dtype)
    vectors = 0.1 * torch.randn(SAMPLES, TABLES * WIDTH, device="cuda", generator=random)
    label = torch.randint(2, (SAMPLES,), device="cuda", generator=random).float()
    vectors = vectors.to(dtype).requires_grad_()

    def step() -> list[Tensor]:
        click = model.head(torch.cat([model.bottom(dense), vectors], 1))
        mean = loss(click, label.to(click.dtype))
        return [mean.detach(), *torch.autograd.grad(1024 * mean, [vectors, *model.parameters()])]

    return step


@pytest.mark.parametrize("name", ["dlrm_dcnv2", "dlrm"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.06), (torch.bfloat16, 0.2)], ids=str)
def test_networks_are_those_of_float64_but_for_rounding(dtype: torch.dtype, bound: float, name: str) -> None:
    """A result that rounding moves over zero has another gradient: a share of them all as large as the rounding."""
    model, exact = dense_network(name, dtype), dense_network(name, torch.float64)
    assert "reference" not in model.choices.values()
    assert set(exact.choices.values()) == {"reference"}
    exact.load_state_dict(model.state_dict())
    found, expected = training(model, dtype)(), training(exact, torch.float64)()
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-3)
    for value, formula in zip(found[1:], expected[1:], strict=True):
        error = (value.double() - formula).norm() / formula.norm()
        assert error < bound, f"{tuple(value.shape)}: relative error {error:.2e}"


@pytest.mark.parametrize("name", ["dlrm_dcnv2", "dlrm"])
def test_a_captured_micro_batch_is_the_eager_one(name: str) -> None:
    model = dense_network(name, torch.bfloat16)
    step = training(model, torch.bfloat16)
    graph, found = captured(step)
    for value in found:
        value.fill_(torch.nan)
    graph.replay()
    for one, other in zip(found, step(), strict=True):
        torch.testing.assert_close(one, other)
