"""Synthetic ids: in range, with the given skew, and with the computed number of different rows of click logs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from criteo_tables import HOTNESS, ROWS

from common.recommendation.tables import EXPONENT, Table, Tables, synthetic_ids


def criteo(cap: int) -> Tables:
    made = [Table(f"t{n}", min(rows, cap), hot) for n, (rows, hot) in enumerate(zip(ROWS, HOTNESS, strict=True))]
    return Tables(tuple(made), 128)


@pytest.mark.parametrize(("distribution", "distinct"), [("uniform", 1_190_083), ("zipf", 626_310)])
def test_a_batch_has_as_many_different_rows_as_computed(distribution, distinct):
    # 6,912 samples, five tables capped at 5 million rows; expectations over the exact distributions
    tables = criteo(5_000_000)
    ids = synthetic_ids(tables, 6912, distribution, torch.Generator().manual_seed(0)).numpy()
    assert ids.shape == (6912, 214)
    found = 0
    for table, column in zip(tables.tables, tables.columns, strict=True):
        own = ids[:, column : column + table.hotness]
        assert 0 <= own.min() <= own.max() < table.rows
        found += len(np.unique(own))
    assert found == pytest.approx(distinct, rel=0.02)


def test_skewed_first_ids_follow_zipfs_law_and_the_others_follow_them():
    tables = Tables((Table("a", 50, 3), Table("b", 50, 1)), 8)
    ids = synthetic_ids(tables, 200_000, "zipf", torch.Generator().manual_seed(1)).numpy()
    weight = np.arange(1, 51) ** -EXPONENT
    expected = weight / weight.sum()
    shares = np.bincount(ids[:, 0], minlength=50) / len(ids)
    np.testing.assert_allclose(shares, expected, rtol=0.1)
    assert len(np.unique(ids[:, :3], axis=0)) == 50
    assert not np.array_equal(ids[:, 0], ids[:, 3])
