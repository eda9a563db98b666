"""Initial rows: uniform, and independent of the rank that holds them."""

from __future__ import annotations

import math

import pytest
import torch

from common.errors import ConfigError
from common.recommendation import row_store
from common.recommendation.placement import TableShard
from common.recommendation.row_store import RowStore, fill, fill_chosen
from common.recommendation.tables import Table, Tables


def filled(table: int, rows: int, width: int, seed: int = 7, shard: int = 0, shards: int = 1) -> torch.Tensor:
    found = torch.full((len(range(shard, rows, shards)), width), torch.nan)
    fill(found, table, rows, seed, shard, shards)
    return found


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("shards", [2, 3, 50])
def test_shards_have_the_rows_of_the_whole_table(width, shards, monkeypatch):
    whole = filled(3, 40, width)
    monkeypatch.setattr(row_store, "CHUNK", 5 * width)
    for shard in range(shards):
        assert torch.equal(filled(3, 40, width, shard=shard, shards=shards), whole[shard::shards])


@pytest.mark.parametrize("width", [8, 6])
def test_chosen_rows_are_those_of_the_whole_table(width, monkeypatch):
    monkeypatch.setattr(row_store, "CHUNK", 3 * width)
    chosen = torch.tensor([39, 0, 7, 11, 2, 38, 12])
    found = torch.full((len(chosen), width), torch.nan)
    fill_chosen(found, 3, 40, 7, chosen)
    assert torch.equal(found, filled(3, 40, width)[chosen])


def test_elements_are_uniform_and_symmetric():
    rows = 4000
    scaled = filled(0, rows, 64).double() * math.sqrt(rows)
    assert float(scaled.abs().max()) < 1 + 1e-6
    edges = torch.linspace(-1, 1, 21, dtype=torch.float64)
    counts = torch.histogram(scaled.flatten(), edges).hist
    expected = scaled.numel() / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 45  # chi-square of 19 degrees: 1 of 1,000
    assert abs(float(scaled.mean())) < 4 / math.sqrt(3 * scaled.numel())


def test_neighbours_are_independent():
    rows = filled(0, 4000, 64).double() * math.sqrt(3 * 4000)  # of variance 1
    for other in (rows.roll(1, 0), rows.roll(1, 1), filled(1, 4000, 64).double() * math.sqrt(3 * 4000)):
        assert abs(float((rows * other).mean())) < 4 / math.sqrt(rows.numel())


def test_seed_and_table_decide():
    assert not torch.equal(filled(0, 9, 4), filled(1, 9, 4))
    assert not torch.equal(filled(0, 9, 4), filled(0, 9, 4, seed=8))
    assert not torch.equal(filled(0, 9, 4), filled(0, 9, 4, seed=7 + (1 << 32)))


@pytest.mark.parametrize("width", [128, 96])
def test_elements_beyond_32_bits_have_bits_of_their_own(width):
    far = -(-(1 << 32) // width)
    distance = far * width - (1 << 32)
    row = filled(0, 2**27, width, shard=far, shards=2**27)[0]  # 2**32 elements behind the beginning, or a few more
    assert len(row.unique()) > width - 3
    first = filled(0, 2**27, width, shard=0, shards=2**27)[0]
    assert not torch.equal(row[: width - distance], first[distance:])


def test_other_dtypes_round_the_same_values():
    rows, half = torch.empty(30, 8, dtype=torch.float64), torch.empty(30, 8, dtype=torch.float16)
    fill(rows, 2, 30, 7)
    fill(half, 2, 30, 7)
    assert torch.equal(rows.float(), filled(2, 30, 8))
    assert torch.equal(half, rows.half())


def test_tables_without_enough_bits_are_refused():
    with pytest.raises(ValueError, match="at most 2"):
        fill(torch.empty(1, 1 << 20), 0, 2**31 - 1, 7)


def test_rows_beyond_the_hosts_memory_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables((Table("C1", 100, 1),), 4)
    monkeypatch.setattr(row_store, "meminfo", lambda: {"MemAvailable": 1599})
    with pytest.raises(ConfigError, match="1,600 bytes of rows for cpu, which has 1,599 left"):
        RowStore(tables, [TableShard(0, 0, 1)], 1, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(row_store, "meminfo", lambda: {"MemAvailable": 1600})
    assert len(RowStore(tables, [TableShard(0, 0, 1)], 1, torch.float32, torch.device("cpu")).rows_RW) == 100
