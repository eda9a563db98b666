"""Seeds of runs."""

import os

import pytest

from common.mlperf.seeds import draw_seed, experiment_seed


def test_drawn_seeds_are_positive_distinct_and_use_the_upper_bits():
    seeds = [draw_seed() for _ in range(200)]
    assert len(set(seeds)) == 200
    assert all(0 < seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**31


@pytest.mark.parametrize(
    ("entropy", "seed"), [(b"\0" * 8, 1), (b"\xff" * 8, 2**52), (b"\x05" + b"\0" * 7, 6)], ids=["zeros", "ones", "5"]
)
def test_seed_comes_from_the_operating_system(monkeypatch, entropy, seed):
    monkeypatch.setattr(os, "urandom", lambda size: entropy[:size])
    assert draw_seed() == seed


def test_experiments_count_from_one():
    assert [experiment_seed(1000, i) for i in (1, 2, 10)] == [1000, 1001, 1009]
    assert [experiment_seed(0, i) for i in (1, 2)] == [0, 1]


@pytest.mark.parametrize(("base", "experiment"), [(-1, 1), (5, 0), (2**63 - 1, 2)])
def test_seed_outside_the_int64_range_is_an_error(base, experiment):
    with pytest.raises(ValueError, match=r"negative|counted|63 bits"):
        experiment_seed(base, experiment)
