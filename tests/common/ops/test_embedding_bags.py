"""Test the reference of embedding bags in float64 against PyTorch's bags, autograd, and optimizers of dense weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.ops.cases import Draw
from common.ops.embedding_bags import cases
from common.ops.embedding_bags.bags import AdagradRows, Bag, Bags, SgdRows
from common.ops.embedding_bags.reference import (
    dense_gradient_reference,
    pool_reference,
    round_by_chance,
    sort_reference,
    update_reference,
)
from tests.capturable import Capturable

TABLES = ((7, 3), (1, 2), (40, 1), (5, 9))
"""Rows and keys per sample. There are so few rows that keys repeat, in a bag and over samples."""
WIDTH, SAMPLES, RATE, FACTOR = 12, 11, 0.05, 0.25
COLUMNS = sum(hotness for _, hotness in TABLES)


def stores(shards: int) -> list[Bags]:
    """Return the bags of each shard, for all tables in their order."""
    found = []
    for shard in range(shards):
        bags: list[Bag] = []
        base = column = 0
        for rows, hotness in TABLES:
            bags.append(Bag(column, hotness, base, rows, shard, shards))
            column, base = column + hotness, base + bags[-1].own_rows
        found.append(Bags(bags, "cpu"))
    return found


def batch(seed: int, samples: int = SAMPLES) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    keys = [torch.randint(rows, (samples, hotness), generator=random) for rows, hotness in TABLES]
    return torch.cat(keys, 1).to(torch.int32)


def tables(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(99)
    return [torch.randn(rows, WIDTH, dtype=torch.float64, generator=random).to(dtype) for rows, _ in TABLES]


def shard_of(whole: list[Tensor], shard: int, shards: int) -> Tensor:
    return torch.cat([table[shard::shards] for table in whole]).contiguous()


def gradients(seed: int, samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(samples, len(TABLES), WIDTH, dtype=torch.float64, generator=random).to(dtype)


def pooled(whole: list[Tensor], ids: Tensor) -> Tensor:
    """Return the (N, B, W) sums of PyTorch's bags, with autograd."""
    parts = ids.split([hotness for _, hotness in TABLES], 1)
    return torch.stack(
        [torch.nn.functional.embedding_bag(part, table, mode="sum") for part, table in zip(parts, whole, strict=True)],
        1,
    )


def scalars(write: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return learning rate, factor of gradients, and write flag."""
    return torch.tensor(RATE, dtype=dtype), torch.tensor(FACTOR, dtype=dtype), torch.tensor(write)


def trained(rule: Callable[..., torch.optim.Optimizer], steps: int, **settings: float) -> list[Tensor]:
    """Return dense tables after some steps of PyTorch's optimizer."""
    whole = [table.requires_grad_() for table in tables()]
    optimizer = rule(whole, lr=RATE, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        (pooled(whole, batch(step)) * gradients(step) * FACTOR).sum().backward()
        optimizer.step()
    return [table.detach() for table in whole]


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_sums_over_shards_are_pytorchs_bags(shards):
    whole, ids, total = tables(), batch(1), torch.zeros(SAMPLES, len(TABLES), WIDTH, dtype=torch.float64)
    for shard, bags in enumerate(stores(shards)):
        part = torch.full_like(total, torch.nan)
        pool_reference(shard_of(whole, shard, shards), ids, bags, part)
        total += part
    torch.testing.assert_close(total, pooled(whole, ids), rtol=1e-13, atol=1e-13)


def test_vectors_are_written_between_others_in_their_dtype():
    whole, ids, (bags,) = tables(torch.float16), batch(1), stores(1)
    wide = torch.full((SAMPLES, 1 + len(TABLES), WIDTH), 7.0, dtype=torch.bfloat16)
    pool_reference(torch.cat(whole), ids, bags, wide[:, 1:])
    assert (wide[:, 0] == 7).all()
    expected = pooled([table.float() for table in whole], ids)
    torch.testing.assert_close(wide[:, 1:].float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 3])
def test_keys_are_sorted_by_row_and_then_by_place(shards):
    ids = batch(2)
    for bags in stores(shards):
        found = []
        for sample in range(SAMPLES):
            for number, bag in enumerate(bags.bags):
                for key in ids[sample, bag.column : bag.column + bag.hotness].tolist():
                    own = key % shards == bag.shard
                    found.append((bag.base + key // shards if own else bags.rows, sample * len(bags) + number))
        found.sort(key=lambda pair: pair[0])
        keys = sort_reference(ids, bags)
        assert keys.row_M.dtype == keys.source_M.dtype == torch.int32
        assert keys.ours == sum(row < bags.rows for row, _ in found)
        assert list(zip(keys.row_M.tolist(), keys.source_M.tolist(), strict=True)) == found


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("adagrad", [True, False])
def test_updates_are_those_of_pytorchs_optimizers_on_dense_tables(adagrad, shards):
    steps = 3
    expected = trained(torch.optim.Adagrad, steps, eps=1e-8) if adagrad else trained(torch.optim.SGD, steps)
    for shard, bags in enumerate(stores(shards)):
        rows = shard_of(tables(), shard, shards)
        state = torch.zeros_like(rows) if adagrad else None
        for step in range(steps):
            keys = sort_reference(batch(step), bags)
            update_reference(
                keys, gradients(step), rows, state, AdagradRows(1e-8) if adagrad else SgdRows(), *scalars()
            )
        torch.testing.assert_close(rows, shard_of(expected, shard, shards), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shards", [1, 3])
def test_dense_gradients_are_autograds(shards):
    whole, ids = [table.requires_grad_() for table in tables()], batch(4)
    (pooled(whole, ids) * gradients(4)).sum().backward()
    expected = [table.grad for table in whole]
    for shard, bags in enumerate(stores(shards)):
        out = torch.full((bags.rows, WIDTH), torch.nan, dtype=torch.float64)
        dense_gradient_reference(sort_reference(ids, bags), gradients(4), out)
        torch.testing.assert_close(out, shard_of(expected, shard, shards), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["forbidden", "none_ours"])
def test_rows_and_state_keep_their_bits(case):
    bags = stores(1)[0]
    ids = batch(5) if case == "forbidden" else torch.full((SAMPLES, COLUMNS), -1, dtype=torch.int32)
    rows = torch.cat(tables(torch.float32))
    rows[0] = -0.0
    state = rows.abs()
    before = rows.clone(), state.clone()
    keys = sort_reference(ids, bags)
    gradient = gradients(5, dtype=torch.float32)
    if case == "forbidden":
        gradient[0] = torch.nan
    update_reference(keys, gradient, rows, state, AdagradRows(1e-8), *scalars(case != "forbidden", torch.float32))
    for now, then in zip((rows, state), before, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))


def test_keys_outside_their_table_are_nobodys():
    (bags,), ids, rows = stores(1), batch(6), torch.cat(tables())
    ids[3], ids[4] = -1, 40
    out = torch.empty(SAMPLES, len(TABLES), WIDTH, dtype=torch.float64)
    pool_reference(rows, ids, bags, out)
    assert (out[3:5] == 0).all()
    assert (sort_reference(ids, bags).row_M == bags.rows).sum() == 2 * COLUMNS


def test_bags_of_some_columns_leave_the_others():
    ids, whole = batch(7), tables()
    bags = Bags([Bag(6, 9, 0, 5), Bag(0, 3, 5, 7)], "cpu")
    out = torch.empty(SAMPLES, 2, WIDTH, dtype=torch.float64)
    pool_reference(torch.cat([whole[3], whole[0]]), ids, bags, out)
    torch.testing.assert_close(out, pooled(whole, ids)[:, [3, 0]], rtol=1e-13, atol=1e-13)
    assert len(sort_reference(ids, bags).row_M) == SAMPLES * 12


def test_a_graph_can_hold_everything():
    bags, ids = stores(3)[1], batch(8)
    rows = torch.zeros(bags.rows, WIDTH, dtype=torch.float16)
    state = torch.ones(bags.rows, WIDTH)
    gradient, out = gradients(8, dtype=torch.bfloat16), torch.empty(SAMPLES, len(TABLES), WIDTH)
    settings, seed = scalars(dtype=torch.float32), torch.tensor(3)
    with Capturable():
        pool_reference(rows, ids, bags, out)
        keys = sort_reference(ids, bags)
        update_reference(keys, gradient, rows, state, AdagradRows(1e-8), *settings, rounding_seed=seed)
        dense_gradient_reference(keys, gradient, state)
    assert rows.abs().max() > 0


# fp16 rows


def test_rounding_by_chance_is_right_on_average_and_takes_a_neighbour():
    """The values cover fp16's range, including values below its smallest normal one, 6.1e-5."""
    values = torch.tensor([0.0, 1e-9, 3.3e-7, -2.04e-5, 6.103e-5, -1.0004e-3, 0.99999, -123.456, 2049.3])
    draws = 4096
    rounded = round_by_chance(values.expand(draws, -1).contiguous(), torch.tensor(5), torch.arange(draws)).double()
    nearest = values.half()
    step = torch.maximum(
        (nearest.abs().nextafter(torch.tensor(9e9).half()) - nearest.abs()).double(), torch.tensor(0.0)
    )
    assert ((rounded - values.double()).abs() <= step).all()
    bound = 5 * step / 2 / draws**0.5
    assert ((rounded.mean(0) - values.double()).abs() <= bound).all()
    assert (rounded[:, 0] == 0).all()
    assert ((rounded[:, 3:] != rounded[0, 3:]).any(0)).all()


def test_values_of_fp16_stay():
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = bits[bits.isfinite()].reshape(-1, 31 * 64)
    values = torch.cat([finite, -finite])
    rounded = round_by_chance(values.float(), torch.tensor(1), torch.arange(len(values)))
    assert torch.equal(rounded, values)


def test_small_updates_of_fp16_rows_add_up_by_chance_and_are_lost_without():
    bags = Bags([Bag(0, 1, 0, 4)], "cpu")
    steps, wide = 256, 64
    ids, gradient = torch.arange(4, dtype=torch.int32)[:, None], torch.full((4, 1, wide), -1.0)
    settings = torch.tensor(2.0**-13), torch.tensor(1.0), torch.tensor(True)
    nearest = torch.ones(4, wide, dtype=torch.float16)
    by_chance = nearest.clone()
    keys = sort_reference(ids, bags)
    for step in range(steps):
        update_reference(keys, gradient, nearest, None, SgdRows(), *settings)
        update_reference(keys, gradient, by_chance, None, SgdRows(), *settings, rounding_seed=torch.tensor(step))
    assert (nearest == 1).all()
    assert by_chance.float().mean().item() == pytest.approx(1 + steps * 2.0**-13, abs=2e-4)


# Refusals


@pytest.mark.parametrize(
    "arguments",
    [(-1, 1, 0, 5), (0, 0, 0, 5), (0, 1, -1, 5), (0, 1, 0, 0), (0, 1, 0, 5, 2, 2), (0, 1, 0, 5, 0, 0)],
)
def test_impossible_bags_are_refused(arguments):
    with pytest.raises(ValueError, match="no bag of keys"):
        Bag(*arguments)


def test_stores_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least one bag"):
        Bags([], "cpu")
    with pytest.raises(ValueError, match="more than int32 counts"):
        Bags([Bag(0, 1, 0, 2**31 - 2), Bag(1, 1, 2**31 - 2, 9)], "cpu")


def test_tensors_that_do_not_fit_are_refused():
    bags, ids = stores(1)[0], batch(9)
    rows, gradient = torch.cat(tables()), gradients(9)
    keys, out = sort_reference(ids, bags), copy.copy(gradient)
    for bad in (ids[:, :-1], ids[0], torch.cat([ids, ids]).T.contiguous().T):
        with pytest.raises(ValueError, match="keys are"):
            sort_reference(bad, bags)
    with pytest.raises(ValueError, match="vectors of 11 samples"):
        pool_reference(rows, ids, bags, out[:-1])
    for state, rule, text in (
        (rows, SgdRows(), "has no state"),
        (None, AdagradRows(1e-8), "not none"),
        (rows.float(), AdagradRows(1e-8), "torch.float64"),
        (rows[1:], AdagradRows(1e-8), "Adagrad's state"),
    ):
        with pytest.raises(ValueError, match=text):
            update_reference(keys, gradient, rows, state, rule, *scalars())
    with pytest.raises(ValueError, match="rows are contiguous"):
        update_reference(keys, gradient, rows[1:], None, SgdRows(), *scalars())
    with pytest.raises(ValueError, match="gradients of 4 bags"):
        dense_gradient_reference(keys, gradient[:, :2], rows)


# Tables and keys of the cases


def test_tables_are_those_of_the_benchmark():
    """The number of rows, up to the cap, and the number of keys per sample are those of the benchmark."""
    assert len(cases.TABLES) == 26
    assert sum(hotness for _, hotness in cases.TABLES) == 214
    assert sum(rows for rows, _ in cases.TABLES) == 204_184_588 - 5 * 35_000_000


def test_skewed_keys_follow_their_law_and_the_others_of_a_bag_follow_the_first():
    """Compare the frequencies of first keys with the integral of the density."""
    drawn = cases.keys(Draw(torch.device("cpu"), torch.float32), 20_000, ((1000, 5),), skewed=True)
    assert drawn.min() >= 0
    assert drawn.max() < 1000
    order = torch.arange(1, 1002, dtype=torch.float64) ** -0.05
    expected = (order[:-1] - order[1:]) / (1 - order[-1])
    share = torch.bincount(drawn[:, 0], minlength=1000) / 20_000
    assert (share - expected).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    bags = {tuple(bag) for bag in drawn.tolist()}
    assert len(bags) == len({bag[0] for bag in bags}) > 300
    assert torch.bincount(drawn[:, 1:].flatten(), minlength=1000).count_nonzero() > 500
