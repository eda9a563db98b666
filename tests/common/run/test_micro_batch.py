"""The largest micro-batch that fits, from what two of them need."""

from __future__ import annotations

import pytest

from common.run.micro_batch import largest_fitting

CHOICES = [1, 2, 4, 7, 8, 14, 28, 56]


@pytest.mark.parametrize(
    ("room", "expected"),
    [(200, 28), (57, 7), (58, 8), (11, 1), (8, None), (1000, 56)],  # 2 bytes, and 7 a sample
)
def test_what_is_needed_is_extended_linearly(room, expected):
    assert largest_fitting(CHOICES, lambda size: 2 + 7 * size, room) == expected


@pytest.mark.parametrize(("limit", "room", "expected"), [(2, 100, 2), (3, 100, 2), (1, 100, 1), (4, 100, 4)])
def test_a_size_that_runs_out_of_memory_does_not_fit(limit, room, expected):
    assert largest_fitting(CHOICES, lambda size: 7 * size if size <= limit else None, room) == expected


def test_nothing_fits_where_the_smallest_runs_out_of_memory():
    assert largest_fitting(CHOICES, lambda size: None, 1e9) is None
