"""Triton's embedding bags against the reference; run by tests/test_interpreted_kernels.py.

Most values are small integers, whose sums are exact in any order, so that results have to be equal bit by bit. Fresh
memory holds NaN and the largest integers here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.ops import embedding_bags
from common.ops.embedding_bags import reference, triton
from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags, SgdRows, SortedKeys
from common.ops.operation import AUTO, OperationRequest

pytestmark = pytest.mark.usefixtures("poisoned_memory", "rounded_conversions", "bfloat16_products")

BAGS = {
    "one store": Bags([Bag(3, 2, 0, 9), Bag(0, 3, 9, 30), Bag(5, 9, 39, 4)], "cpu"),
    "a shard": Bags([Bag(3, 2, 0, 9, 1, 3), Bag(0, 3, 3, 30, 0, 4), Bag(5, 9, 11, 4, 3, 8)], "cpu"),
}
COLUMNS, WIDTH, SAMPLES = 14, 12, 13
DTYPES = pytest.mark.parametrize(
    ("store", "dtype"),
    [("one store", torch.float32), ("a shard", torch.float16), ("one store", torch.bfloat16)],
    ids=str,
)
STORES = pytest.mark.parametrize("bags", BAGS.values(), ids=BAGS)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs cross a few tiles, and the longest has more of them than are added up at a time."""
    monkeypatch.setitem(triton.TILES, "pool", triton.PoolTile(4, 4, 4))
    monkeypatch.setitem(triton.TILES, "update", triton.UpdateTile(16, 4, 3, 1))
    monkeypatch.setitem(triton.TILES, "long_runs", triton.LongRunsTile(2, 4, 2))
    monkeypatch.setattr(triton, "BLOCK", 128)


def batch(seed: int = 0, samples: int = SAMPLES) -> Tensor:
    """Keys, some of which are in no table."""
    return torch.randint(-2, 32, (samples, COLUMNS), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def integers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_of(keys: SortedKeys, samples: int, dtype: torch.dtype) -> Tensor:
    """Integers between other numbers, as they lie in the gradient of a wider matrix."""
    return integers(samples, 1 + keys.bags, WIDTH, seed=2, dtype=dtype)[:, 1:]


def scalars(write: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Rate, factor and permission."""
    return torch.tensor(0.25), torch.tensor(0.5), torch.tensor(write)


def both(keys: SortedKeys, gradient: Tensor, rows: Tensor, state: Tensor | None, *rest: Any, **settings: Any) -> None:
    """Update by the kernels, and as the reference does on copies; both have to agree."""
    expected_rows, expected_state = rows.clone(), None if state is None else state.clone()
    reference.update_reference(keys, gradient, expected_rows, expected_state, *rest, **settings)
    triton.update(keys, gradient, rows, state, *rest, **settings)
    if state is None:
        assert torch.equal(rows, expected_rows)
    else:
        assert expected_state is not None
        assert torch.equal(state, expected_state)
        torch.testing.assert_close(rows, expected_rows, rtol=1e-6, atol=1e-6)


@DTYPES
def test_vectors_are_the_references(store: str, dtype: torch.dtype) -> None:
    bags = BAGS[store]
    rows = integers(bags.rows, WIDTH, dtype=torch.float16 if dtype == torch.float16 else torch.float32)
    wide, expected = (torch.full((SAMPLES, 1 + len(bags), WIDTH), 7.0, dtype=dtype) for _ in range(2))
    triton.pool(rows, batch(), bags, wide[:, 1:])
    reference.pool_reference(rows, batch(), bags, expected[:, 1:])
    assert torch.equal(wide, expected)
    assert (wide[:, 1:] != 0).any(2).sum() > SAMPLES


@STORES
@pytest.mark.parametrize("samples", [SAMPLES, 1])
def test_keys_are_sorted_as_the_reference_does(bags: Bags, samples: int) -> None:
    found, expected = triton.sort(batch(samples=samples), bags), reference.sort_reference(batch(samples=samples), bags)
    assert found[3:] == expected[3:]
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert isinstance(one, Tensor)
        assert one.dtype == torch.int32
        assert torch.equal(one, other)


@DTYPES
@pytest.mark.parametrize("adagrad", [True, False], ids=["Adagrad", "SGD"])
def test_rows_are_updated_as_by_the_reference(store: str, dtype: torch.dtype, adagrad: bool) -> None:
    bags = BAGS[store]
    keys = reference.sort_reference(batch(), bags)
    rows, state = integers(bags.rows, WIDTH), integers(bags.rows, WIDTH, seed=5).abs()
    rule = AdagradRows(0.125) if adagrad else SgdRows()
    both(keys, gradient_of(keys, SAMPLES, dtype), rows, state if adagrad else None, rule, *scalars())
    assert not torch.equal(rows, integers(bags.rows, WIDTH))


@pytest.mark.parametrize("samples", [1, 30])
def test_one_row_for_all_keys(samples: int) -> None:
    """A run over more tiles than are added up at a time, from the first key to the last."""
    bags = Bags([Bag(0, 9, 0, 3), Bag(9, 1, 0, 3)], "cpu")
    keys = reference.sort_reference(torch.ones(samples, 10, dtype=torch.int32), bags)
    rows, state = integers(3, WIDTH), torch.zeros(3, WIDTH)
    both(keys, gradient_of(keys, samples, torch.float16), rows, state, AdagradRows(1e-8), *scalars())
    assert (state > 0).any(1).tolist() == [False, True, False]


def test_runs_that_end_and_begin_at_the_borders_of_tiles() -> None:
    """Runs of 16, 1, 15, 32, 17, 3 and 12 keys, and tiles of 16."""
    lengths = torch.tensor([16, 1, 15, 32, 17, 3, 12])
    row = torch.arange(len(lengths)).repeat_interleave(lengths).to(torch.int32)
    keys = SortedKeys(row, torch.arange(len(row), dtype=torch.int32), torch.tensor(len(row)), 1, len(lengths))
    gradient, rows = integers(len(row), 1, WIDTH), integers(len(lengths), WIDTH)
    expected = torch.stack([part.sum(0) for part in gradient[:, 0].split(lengths.tolist())])
    before = rows.clone()
    both(keys, gradient, rows, None, SgdRows(), *scalars())
    assert torch.equal(rows, before - 0.125 * expected)
    out = torch.full_like(rows, torch.nan)
    triton.dense_gradient(keys, gradient, out)
    assert torch.equal(out, expected)


@STORES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dense_gradients_are_the_references(bags: Bags, dtype: torch.dtype) -> None:
    keys = reference.sort_reference(batch(3), bags)
    gradient = gradient_of(keys, SAMPLES, torch.bfloat16)
    out, expected = (torch.full((bags.rows, WIDTH), torch.nan, dtype=dtype) for _ in range(2))
    triton.dense_gradient(keys, gradient, out)
    reference.dense_gradient_reference(keys, gradient, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("case", ["forbidden", "none ours"])
def test_rows_and_state_keep_their_bits(case: str) -> None:
    bags = BAGS["one store"]
    keys = reference.sort_reference(batch() if case == "forbidden" else torch.full_like(batch(), -1), bags)
    gradient = gradient_of(keys, SAMPLES, torch.float32)
    gradient[0] = torch.nan
    rows, state = -integers(bags.rows, WIDTH).abs(), integers(bags.rows, WIDTH)
    before = rows.clone(), state.clone()
    triton.update(keys, gradient, rows, state, AdagradRows(1e-8), *scalars(case != "forbidden"))
    for now, then in zip((rows, state), before, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))


@pytest.mark.parametrize("seed", [None, -0x0123456789ABCDEF], ids=["to the nearest", "by chance"])
def test_half_rows_are_rounded_as_the_reference_rounds(seed: int | None) -> None:
    bags = BAGS["one store"]
    keys = reference.sort_reference(batch(), bags)
    before = (integers(bags.rows, WIDTH) / 4).half()
    rows = before.clone()
    settings = (torch.tensor(2.0**-15), torch.tensor(1.0), torch.tensor(True))
    both(
        keys, gradient_of(keys, SAMPLES, torch.float16), rows, None, SgdRows(), *settings,
        rounding_seed=None if seed is None else torch.tensor(seed),
    )  # fmt: skip
    assert not torch.equal(rows, before)


def test_sums_of_fp32_are_within_rounding_of_fp64() -> None:
    bags, random = BAGS["one store"], torch.Generator().manual_seed(6)
    keys = triton.sort(batch(6), bags)
    gradient = torch.randn(SAMPLES, len(bags), WIDTH, generator=random)
    rows, state = torch.randn(bags.rows, WIDTH, generator=random), torch.zeros(bags.rows, WIDTH)
    expected, expected_state = rows.double(), state.double()
    settings = scalars()
    wide = (settings[0].double(), settings[1].double(), settings[2])
    reference.update_reference(keys, gradient.double(), expected, expected_state, AdagradRows(1e-8), *wide)
    again, state_again = rows.clone(), state.clone()
    triton.update(keys, gradient, rows, state, AdagradRows(1e-8), *settings)
    torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-5, atol=1e-6)
    triton.update(keys, gradient, again, state_again, AdagradRows(1e-8), *settings)
    assert torch.equal(rows, again)
    assert torch.equal(state, state_again)


def test_nothing_to_do() -> None:
    bags = BAGS["one store"]
    none, nothing = batch()[:0], torch.zeros(0, len(bags), WIDTH)
    rows, out = integers(bags.rows, WIDTH), torch.full((bags.rows, WIDTH), torch.nan)
    triton.pool(rows, none, bags, nothing)
    keys = triton.sort(none, bags)
    both(keys, nothing, rows, None, SgdRows(), *scalars())
    triton.dense_gradient(keys, nothing, out)
    assert torch.equal(rows, integers(bags.rows, WIDTH))
    assert (out == 0).all()
    empty = Bags([Bag(0, 1, 0, 3, 5, 8)], "cpu")
    assert empty.rows == 0
    vectors = torch.full((SAMPLES, 1, WIDTH), torch.nan)
    triton.pool(torch.zeros(0, WIDTH), batch(), empty, vectors)
    assert (vectors == 0).all()
    both(triton.sort(batch(), empty), vectors, torch.zeros(0, WIDTH), None, SgdRows(), *scalars())


def test_tensors_that_do_not_fit_are_refused() -> None:
    bags = BAGS["one store"]
    rows, vectors = integers(bags.rows, WIDTH), torch.zeros(SAMPLES, len(bags), WIDTH)
    for bad in (rows[1:], integers(WIDTH, bags.rows).T):
        with pytest.raises(ValueError, match="rows are contiguous"):
            triton.pool(bad, batch(), bags, vectors)
    keys = triton.sort(batch(), bags)
    with pytest.raises(ValueError, match="sum in fp32"):
        triton.update(keys, vectors.double(), rows, None, SgdRows(), *scalars())


def test_kernels_are_chosen_where_triton_runs() -> None:
    request = OperationRequest(torch.device("cpu"), torch.float32)
    assert embedding_bags.EMBEDDING_BAGS.select(AUTO, request).name == "triton"
