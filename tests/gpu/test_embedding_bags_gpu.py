"""Embedding bags on a GPU: the CPU's sums, the same bits every time, captured without a wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.ops.embedding_bags import EMBEDDING_BAGS, AdagradRows, Bag, Bags, EmbeddingBags, Rule, SgdRows, bench_cases
from common.ops.embedding_bags.reference import (
    dense_gradient_reference,
    pool_reference,
    sort_reference,
    update_reference,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TABLES = ((5000, 3), (1, 1), (40, 2), (30_000, 40), (7, 9), (900, 1))
COLUMNS = sum(hotness for _, hotness in TABLES)
NAMES = pytest.mark.parametrize("name", EMBEDDING_BAGS.names)


def store(device: str, shard: int = 0, shards: int = 1) -> Bags:
    bags: list[Bag] = []
    column = base = 0
    for rows, hotness in TABLES:
        bags.append(Bag(column, hotness, base, rows, shard, shards))
        column, base = column + hotness, base + bags[-1].own_rows
    return Bags(bags, device)


def batch(samples: int, seed: int = 0) -> Tensor:
    """Keys, half of which are a table's first; some are in no table."""
    random = torch.Generator().manual_seed(seed)
    parts = []
    for rows, hotness in TABLES:
        key = torch.randint(-1, rows, (samples, hotness), generator=random)
        parts.append(torch.where(torch.rand(key.shape, generator=random) < 0.5, key, 0))
    return torch.cat(parts, 1).to(torch.int32)


def scalars(device: str, write: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rate, factor and permission."""
    rate, factor = (torch.tensor(value, dtype=dtype, device=device) for value in (0.05, 0.25))
    return rate, factor, torch.tensor(write, device=device)


def wide_pair(samples: int, bags: Bags, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors of bags behind one more of each sample: random ones on the CPU in fp64, and the same on the GPU.

    They are multiples of 1/64, so that fp32 adds up thousands of them exactly: Adagrad's first step is as long for a
    sum that cancels as for any other.
    """
    vectors = torch.randn(samples, 1 + len(bags), width, generator=torch.Generator().manual_seed(1))
    vectors = (vectors.mul(64).round() / 64).to(dtype)
    return vectors.double()[:, 1:], vectors.cuda()[:, 1:]


@NAMES
@pytest.mark.parametrize("width", [128, 16, 100])
@pytest.mark.parametrize("row_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shard", "shards"), [(0, 1), (1, 3), (7, 8)])
def test_everything_is_the_cpus_in_fp64(
    name: str, width: int, row_dtype: torch.dtype, dtype: torch.dtype, shard: int, shards: int
) -> None:
    function: EmbeddingBags = EMBEDDING_BAGS.function(name)
    samples, ids = 333, batch(333)
    bags, there = store("cpu", shard, shards), store("cuda", shard, shards)
    rows = torch.randn(bags.rows, width, generator=torch.Generator().manual_seed(2))
    rows = (rows.mul(64).round() / 64).to(row_dtype)  # as the vectors: sums are exact
    expected, found = rows.double(), rows.cuda()

    out, out_there = (torch.zeros_like(part) for part in wide_pair(samples, bags, width, dtype))
    pool_reference(expected, ids, bags, out)
    function.pool(found, ids.cuda(), there, out_there)
    step = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    torch.testing.assert_close(out_there.double().cpu(), out, rtol=step[dtype], atol=step[dtype])

    keys, keys_there = sort_reference(ids, bags), function.sort(ids.cuda(), there)
    assert torch.equal(keys_there.row_M.cpu(), keys.row_M)
    assert torch.equal(keys_there.source_M.cpu(), keys.source_M)
    assert keys_there.ours.item() == keys.ours.item()

    gradient, gradient_there = wide_pair(samples, bags, width, dtype)
    dense, dense_there = torch.empty_like(expected), torch.empty(found.shape, device="cuda")
    dense_gradient_reference(keys, gradient, dense)
    function.dense_gradient(keys_there, gradient_there, dense_there)
    torch.testing.assert_close(dense_there.double().cpu(), dense, rtol=1e-5, atol=2e-4)
    function.dense_gradient(keys_there, gradient_there, narrow_there := dense_there.to(dtype).fill_(torch.nan))
    torch.testing.assert_close(narrow_there.double().cpu(), dense, rtol=step[dtype], atol=4 * step[dtype] + 2e-4)

    state, state_there = torch.zeros_like(expected), torch.zeros(found.shape, device="cuda")
    for rule, own, own_there in ((AdagradRows(1e-8), state, state_there), (SgdRows(), None, None)):
        update_reference(keys, gradient, expected, own, rule, *scalars("cpu", dtype=torch.float64))
        function.update(keys_there, gradient_there, found, own_there, rule, *scalars("cuda"))
    torch.testing.assert_close(state_there.double().cpu(), state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=step[row_dtype] * 4, atol=4 * step[row_dtype])


@NAMES
@pytest.mark.parametrize("rule", [AdagradRows(1e-8), SgdRows()], ids=["Adagrad", "SGD"])
def test_nothing_is_written_where_it_is_forbidden(name: str, rule: Rule) -> None:
    function: EmbeddingBags = EMBEDDING_BAGS.function(name)
    bags = store("cuda")
    rows = torch.randn(bags.rows, 128, device="cuda")
    state = rows.abs() if isinstance(rule, AdagradRows) else None
    before = rows.clone(), None if state is None else state.clone()
    gradient = torch.full((64, len(bags), 128), torch.nan, device="cuda")
    function.update(function.sort(batch(64).cuda(), bags), gradient, rows, state, rule, *scalars("cuda", write=False))
    assert torch.equal(rows, before[0])
    assert state is None or torch.equal(state, before[1])  # type: ignore[arg-type]


def test_a_row_of_half_a_million_keys() -> None:
    """1 and 2 in turn, whose sum fp32 holds exactly."""
    function: EmbeddingBags = EMBEDDING_BAGS.function("triton")
    bags = Bags([Bag(0, 50, 0, 3)], "cuda")
    ids = torch.ones(10_000, 50, dtype=torch.int32, device="cuda")
    gradient = (1 + torch.arange(10_000, device="cuda") % 2).half()[:, None, None].expand(-1, 1, 128).contiguous()
    out = torch.full((3, 128), torch.nan, device="cuda")
    function.dense_gradient(function.sort(ids, bags), gradient, out)
    assert (out[1] == 750_000).all()
    assert (out[[0, 2]] == 0).all()


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


@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "skewed"])
def test_the_benchmarks_batch_has_the_same_bits_twice_and_is_the_references(
    skewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are integers, whose sums are exact in any order."""
    monkeypatch.setattr(bench_cases, "TABLES", tuple((min(r, 1_000_000), h) for r, h in bench_cases.TABLES))
    plain, fast = (EMBEDDING_BAGS.function(name) for name in ("reference", "triton"))
    torch.manual_seed(0)
    bags, ids = bench_cases.bags_of(bench_cases.TABLES), bench_cases.keys(bench_cases.SAMPLES, skewed)
    gradient = torch.randint(-8, 9, (len(ids), 1 + len(bags), bench_cases.WIDTH), device="cuda").half()[:, 1:]
    first = torch.randn(bags.rows, bench_cases.WIDTH, device="cuda")
    results = []
    for function in (fast, fast, plain):
        rows, state = first.clone(), torch.zeros_like(first)
        function.update(function.sort(ids, bags), gradient, rows, state, AdagradRows(1e-8), *scalars("cuda"))
        out = torch.zeros_like(gradient)
        function.pool(rows, ids, bags, out)
        results.append((rows, state, out))
    one, again, expected = results
    assert all(torch.equal(found, other) for found, other in zip(one, again, strict=True))
    assert torch.equal(one[1], expected[1])
    torch.testing.assert_close(one[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one[2], expected[2], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tile", [(16, 4, 16, 1), (16, 2, 2, 2), (32, 4, 64, 2), (32, 8, 4, 3), (64, 8, 1, 3)], ids=str)
def test_sums_that_are_exact_are_the_same_in_every_tile(tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With loads as they come, and under way ahead of their tile."""
    from common.ops.embedding_bags import triton

    function: EmbeddingBags = EMBEDDING_BAGS.function("triton")
    monkeypatch.setitem(triton.TILES, "update", triton.UpdateTile(*tile))
    bags, ids = store("cuda"), batch(3000).cuda()
    gradient = torch.randint(-8, 9, (3000, 1 + len(bags), 128), device="cuda").half()[:, 1:]
    rows, state = (torch.zeros(bags.rows, 128, device="cuda") for _ in range(2))
    expected, expected_state = rows.clone(), state.clone()
    for _ in range(2):
        keys = function.sort(ids, bags)
        function.update(keys, gradient, rows, state, AdagradRows(1e-8), *scalars("cuda"))
        update_reference(keys, gradient, expected, expected_state, AdagradRows(1e-8), *scalars("cuda"))
        assert torch.equal(state, expected_state)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
        ids = ids.flip(0)


@NAMES
def test_a_captured_step_takes_new_keys(name: str) -> None:
    """fp16 rows with rounding by chance, whose seed is on the device too."""
    function: EmbeddingBags = EMBEDDING_BAGS.function(name)
    bags, ids, seed = store("cuda"), batch(512).cuda(), torch.tensor(7, device="cuda")
    first = torch.randn(bags.rows, 128, device="cuda").half()
    rows, state, out = first.clone(), torch.zeros(first.shape, device="cuda"), torch.empty(512, len(bags), 128).cuda()
    gradient = wide_pair(512, bags, 128, torch.float32)[1].contiguous()  # whose sums are exact in any order
    settings = scalars("cuda")

    def step() -> None:
        function.pool(rows, ids, bags, out)
        keys = function.sort(ids, bags)
        function.update(keys, gradient, rows, state, AdagradRows(1e-8), *settings, rounding_seed=seed)

    def restart(number: int) -> None:
        rows.copy_(first)
        state.zero_()
        ids.copy_(batch(512, number))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in (1, 2):
        restart(number)
        step()
        eager = rows.clone(), state.clone(), out.clone()
        restart(number)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip((rows, state, out), eager, strict=True))
        assert not torch.equal(rows, first)


def test_half_rows_are_rounded_by_chance_as_on_the_cpu() -> None:
    """Every row has one key, so that sums are exact."""
    function: EmbeddingBags = EMBEDDING_BAGS.function("triton")
    bags, there = (Bags([Bag(0, 1, 0, 4000)], device) for device in ("cpu", "cuda"))
    ids = torch.randperm(4000, generator=torch.Generator().manual_seed(0)).to(torch.int32)[:, None]
    rows = (torch.randn(4000, 128, generator=torch.Generator().manual_seed(1)) * 1e-4).half()
    gradient = torch.randint(-8, 9, (4000, 1, 128), generator=torch.Generator().manual_seed(2)).half()
    found = rows.cuda()
    rate, factor, write, seed = torch.tensor(2.0**-22), torch.tensor(1.0), torch.tensor(True), torch.tensor(-5)
    update_reference(sort_reference(ids, bags), gradient, rows, None, SgdRows(), rate, factor, write, seed)
    keys = function.sort(ids.cuda(), there)
    settings = (rate.cuda(), factor.cuda(), write.cuda(), seed.cuda())
    function.update(keys, gradient.cuda(), found, None, SgdRows(), *settings)
    assert torch.equal(found.cpu(), rows)


def test_fbgemm_trains_the_same_rows():
    pytest.importorskip("fbgemm_gpu")
    from common.ops.embedding_bags import fbgemm_bench

    assert fbgemm_bench.compare() < 1e-5
