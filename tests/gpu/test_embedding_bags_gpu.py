"""Test embedding bags on a GPU: tiles that no case has, large stores and captured steps."""

from __future__ import annotations

import pytest
import torch

from common.ops.cases import Draw
from common.ops.embedding_bags import EMBEDDING_BAGS, AdagradRows, Bag, Bags, EmbeddingBags, SgdRows
from common.ops.embedding_bags.cases import CASES, bags_of, keys
from common.ops.tile import Tile
from tests.gpu.captures import captured
from tests.operation_checks import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda")
TABLES = ((5000, 3), (1, 1), (40, 2), (30_000, 40), (7, 9), (900, 1))


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


@pytest.mark.parametrize("name", EMBEDDING_BAGS.names)
def test_a_captured_step_takes_new_keys(name: str) -> None:
    """Rows in fp16 use stochastic rounding with a seed on the device. Gradients are integers, so sums are exact."""
    function: EmbeddingBags = EMBEDDING_BAGS.function(name)
    draw, bags, seed = Draw(GPU, torch.float32), bags_of(TABLES, GPU), torch.tensor(7, device=GPU)
    batches = [keys(draw, 512, TABLES, skewed=True) for _ in range(3)]
    first, gradient = draw.normal(bags.rows, 128, dtype=torch.float16), draw.normal(512, len(bags), 128).round()
    ids, rows, state, out = batches[0].clone(), first.clone(), torch.zeros(first.shape, device=GPU), gradient.clone()
    settings = [torch.full((), value, device=GPU) for value in (0.05, 0.25, True)]

    def step() -> None:
        function.pool(rows, ids, bags, out)
        found = function.sort(ids, bags)
        function.update(found, gradient, rows, state, AdagradRows(1e-8), *settings, rounding_seed=seed)

    def restart(number: int) -> None:
        rows.copy_(first)
        state.zero_()
        ids.copy_(batches[number])

    graph, _ = captured(step)
    for number in (1, 2):
        restart(number)
        step()
        eager = rows.clone(), state.clone(), out.clone()
        restart(number)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip((rows, state, out), eager, strict=True))
        assert not torch.equal(rows, first)
