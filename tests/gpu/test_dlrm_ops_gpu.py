"""Test operations and dense networks of the DLRMs on a GPU: large tensors, other tiles, and captured steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.dlrm import model as dlrm
from benchmarks.dlrm.ops import dot_interaction
from benchmarks.dlrm_dcnv2 import model as dlrm_dcnv2
from benchmarks.dlrm_dcnv2.ops import cross_network
from common.ops.embedding_bags import EMBEDDING_BAGS, Bag, Bags, EmbeddingBags, SgdRows
from common.ops.embedding_bags.cases import CASES
from common.ops.tile import Tile
from common.recommendation.click_network import ClickArchitecture, loss
from tests.benchmarks.dlrm import dot_interaction_oracle
from tests.benchmarks.dlrm_dcnv2 import cross_network_oracle
from tests.gpu.support import GPU, captured, relative_error
from tests.operation_checks import check

pytestmark = pytest.mark.gpu

SAMPLES = 6912
TABLES, WIDTH = 26, 128
LARGE, KEPT = 700_000, 1000


def assert_close(found: list[Tensor], formulas: list[Tensor]) -> None:
    for number, (value, formula) in enumerate(zip(found, formulas, strict=True)):
        assert relative_error(value, formula) < 1.6e-2, number


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
    """Return the dense network of a DLRM at its full size."""
    generator = torch.Generator().manual_seed(1)
    if name == "dlrm":
        sizes = ClickArchitecture(13, WIDTH, (512, 256, WIDTH), (1024, 1024, 512, 256, 1))
        return dlrm.DlrmNetwork(sizes, TABLES, {}, GPU, dtype, generator)
    crossed = dlrm_dcnv2.DlrmDcnv2Architecture(13, WIDTH, (512, 256, WIDTH), (1024, 1024, 512, 256, 1), 3, 512)
    return dlrm_dcnv2.DlrmDcnv2Network(crossed, TABLES, {}, GPU, dtype, generator)


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
    """Rounding changes the sign of some inputs of ReLU, and so their gradients; their share is as large as the
    rounding."""
    model, exact = dense_network(name, dtype), dense_network(name, torch.float64)
    assert "reference" not in model.choices.values()
    assert set(exact.choices.values()) == {"reference"}
    exact.load_state_dict(model.state_dict())
    found, expected = training(model, dtype)(), training(exact, torch.float64)()
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-3)
    for value, formula in zip(found[1:], expected[1:], strict=True):
        assert relative_error(value, formula) < bound, tuple(value.shape)


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


# Embedding bags


@pytest.mark.parametrize("tile", [(16, 4, 16, 1), (16, 2, 2, 2), (32, 4, 64, 2), (32, 8, 4, 3), (64, 8, 1, 3)], ids=str)
def test_exact_sums_are_the_same_in_every_tile(tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles load values directly or prefetch them for later tiles."""
    from common.ops.embedding_bags import triton

    keys, warps, programs, stages = tile
    monkeypatch.setitem(triton.TILES, "update", Tile(keys=keys, warps=warps, programs=programs, stages=stages))
    case = CASES[-1]
    assert case.exact
    assert case.gpu is not None
    for dtype in (torch.float16, torch.bfloat16):
        check(EMBEDDING_BAGS, "triton", case, case.gpu, dtype, GPU)


def test_rows_beyond_two_to_the_31_values() -> None:
    function: EmbeddingBags = EMBEDDING_BAGS.function("triton")
    count = 20_000_000
    bags = Bags([Bag(0, 2, 0, count)], "cuda")
    rows = torch.zeros(count, 128, dtype=torch.float16, device="cuda")
    rows[-3] = 2
    ids = torch.tensor([[count - 3, count - 1], [5, count - 3]], dtype=torch.int32, device="cuda")
    out = torch.empty(2, 1, 128, device="cuda")
    function.pool(rows, ids, bags, out)
    assert (out == 2).all()
    rate, factor, write = (torch.tensor(value, device="cuda") for value in (1.0, 1.0, True))
    function.update(function.sort(ids, bags), out, rows, None, SgdRows(), rate, factor, write)
    assert (rows[-3] == -2).all()
    assert (rows[-1] == -2).all()
    assert (rows[5] == -2).all()
    assert rows[:5].count_nonzero() + rows[6:-3].count_nonzero() + rows[-2].count_nonzero() == 0
